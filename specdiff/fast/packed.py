"""A recognised model with its weights packed for CPU kernels, and its layers as plain functions.

At batch 1 a pass waits for memory and for the overhead of many small operators, so both are kept few: q, k, v are one
matrix product, gate and up another, and inside each query and key head the two rows that one rotation mixes (i and i +
D/2) are put side by side, which makes the rotary embedding of all heads one complex multiplication in place. Dot
products do not see the order, so nothing else changes.

Shapes: N inputs (all rows), T inputs per row, H width, h query heads, g key heads, D head width, C cache columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdiff.fast.linear import PackedLinear, pack
from specdiff.fast.norm import RmsNorm
from specdiff.fast.recognise import LayerParts, Norm, NotRecognisedError, Parts


@dataclass(frozen=True)
class PackedLayer:
    """One decoder layer. ``head_norm`` norms query and key heads at once: its weight is ``[h + g, D]``."""

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    act: Callable[[Tensor], Tensor]
    attention_norm: RmsNorm
    mlp_norm: RmsNorm
    head_norm: RmsNorm | None
    after_attention: RmsNorm | None
    after_mlp: RmsNorm | None
    rotary: str | None
    scaling: float


@dataclass(frozen=True)
class PackedModel:
    """What the fast path keeps of a model: packed copies of its matrices, references to the rest."""

    parts: Parts
    layers: list[PackedLayer]
    norm: RmsNorm
    head: PackedLinear

    @property
    def linears(self) -> list[PackedLinear]:
        """All matrices."""
        return [linear for x in self.layers for linear in (x.qkv, x.o, x.gate_up, x.down)] + [self.head]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass over one input reads, small vectors aside."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def kernels(self) -> dict[str, int]:
        """How many matrices run on which kernel."""
        names = [linear.kernel for linear in self.linears]
        return {name: names.count(name) for name in sorted(set(names))}


def pack_model(parts: Parts) -> PackedModel:
    """Pack all matrices of a recognised model (copies; the model is only read).

    Raises:
        NotRecognisedError: query and key norms that cannot be joined.
    """
    with torch.no_grad():
        layers = [_pack_layer(parts, layer) for layer in parts.layers]
        norm = RmsNorm(parts.norm.weight, parts.norm.eps)
        return PackedModel(parts, layers, norm, pack(parts.head.weight, parts.head.bias))


def _pack_layer(parts: Parts, layer: LayerParts) -> PackedLayer:
    half = parts.head_dim // 2
    pair = torch.arange(parts.head_dim).view(2, half).t().reshape(-1)  # 0, D/2, 1, D/2 + 1, ...

    def paired(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, parts.head_dim))[:, pair].flatten(0, 1)

    def bias(linear: torch.nn.Linear) -> Tensor:
        return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias

    def joined(*linears: torch.nn.Linear) -> bool:
        return any(linear.bias is not None for linear in linears)

    q, k, v, gate, up = layer.q, layer.k, layer.v, layer.gate, layer.up
    return PackedLayer(
        qkv=pack(
            torch.cat([paired(q.weight), paired(k.weight), v.weight]),
            torch.cat([paired(bias(q)), paired(bias(k)), bias(v)]) if joined(q, k, v) else None,
        ),
        o=pack(layer.o.weight, layer.o.bias),
        gate_up=pack(
            torch.cat([gate.weight, up.weight]), torch.cat([bias(gate), bias(up)]) if joined(gate, up) else None
        ),
        down=pack(layer.down.weight, layer.down.bias),
        act=layer.act,
        attention_norm=RmsNorm(layer.attention_norm.weight, layer.attention_norm.eps),
        mlp_norm=RmsNorm(layer.mlp_norm.weight, layer.mlp_norm.eps),
        head_norm=_head_norm(parts, layer, pair),
        after_attention=_optional(layer.after_attention),
        after_mlp=_optional(layer.after_mlp),
        rotary=layer.rotary,
        scaling=layer.scaling,
    )


def _optional(norm: Norm | None) -> RmsNorm | None:
    return None if norm is None else RmsNorm(norm.weight, norm.eps)


def _head_norm(parts: Parts, layer: LayerParts, pair: Tensor) -> RmsNorm | None:
    q, k = layer.q_norm, layer.k_norm
    if q is None and k is None:
        return None
    if q is None or k is None or q.eps != k.eps:
        raise NotRecognisedError("its queries and keys are normed differently")
    weight = torch.cat([q.weight[pair].expand(parts.heads, -1), k.weight[pair].expand(parts.kv_heads, -1)])
    return RmsNorm(weight, q.eps)


def rotary_tables(parts: Parts, length: int) -> dict[str, Tensor]:
    """Complex rotation ``[length, 1, D / 2]`` at positions 0 .. length - 1 for each table that a layer uses.

    The model's own rotary module computes them, so that every static scaling is as the model has it.

    Raises:
        NotRecognisedError: only a part of each head is rotated.
    """
    positions, like = torch.arange(length)[None], torch.zeros(1, dtype=torch.float32)
    half = parts.head_dim // 2
    tables: dict[str, Tensor] = {}
    for kind in sorted({layer.rotary for layer in parts.layers if layer.rotary is not None}):
        cos, sin = parts.rotary(like, positions, kind) if kind else parts.rotary(like, positions)
        if cos.shape[-1] != parts.head_dim:
            raise NotRecognisedError("it rotates only a part of each head")
        tables[kind] = torch.complex(cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous())
    return tables


@dataclass(frozen=True)
class RowSpan:
    """One row of a pass: what it sees, and what it writes.

    Attributes:
        columns: ``Long[T]`` cache columns of its inputs, which are also their positions.
        seen: columns that its last input sees.
        mask: additive ``[T, seen]``, or None where none is needed.
        causal: the row starts at column 0, so that the kernel's own causal mask fits.
    """

    columns: Tensor
    seen: int
    mask: Tensor | None
    causal: bool


def row_span(line: Tensor, start: int, width: int) -> RowSpan:
    """The span of ``width`` inputs behind ``start`` committed ones; ``line`` holds 0, 1, 2, ..."""
    seen = start + width
    mask = None
    if start and width > 1:
        mask = torch.zeros(width, seen, dtype=torch.float32)
        mask[:, start:].fill_(float("-inf")).triu_(1)
    return RowSpan(line[start:seen], seen, mask, causal=not start and width > 1)


def run_layer(
    parts: Parts, layer: PackedLayer, x: Tensor, cache: Tensor, spans: Sequence[RowSpan], turn: Tensor | None
) -> Tensor:
    """One decoder layer.

    Args:
        parts: the model's head layout.
        layer: the layer.
        x: ``[N, H]`` residual stream.
        cache: ``[B, 2 * g, C, D]`` keys, then values; written at the columns of ``spans``.
        spans: one per row.
        turn: complex ``[N, 1, D / 2]`` rotation of each input, or None.

    Returns:
        ``[N, H]``.
    """
    heads, groups = parts.heads, parts.kv_heads
    qkv = layer.qkv(layer.attention_norm(x)).view(x.shape[0], heads + 2 * groups, parts.head_dim)
    turned = qkv.narrow(1, 0, heads + groups)
    if layer.head_norm is not None:
        turned.mul_(layer.head_norm.scale(turned)).mul_(layer.head_norm.weight)
    if turn is not None:
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(turn)
    mixed = layer.o(attend(qkv, cache, spans, heads, layer.scaling))
    x = x + (mixed if layer.after_attention is None else layer.after_attention(mixed))
    gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
    mixed = layer.down(layer.act(gate).mul_(up))
    return x + (mixed if layer.after_mlp is None else layer.after_mlp(mixed))


def attend(qkv: Tensor, cache: Tensor, spans: Sequence[RowSpan], heads: int, scaling: float) -> Tensor:
    """Store keys and values, then causal attention of each row over exactly its own length.

    Args:
        qkv: ``[N, h + 2 * g, D]``.
        cache: ``[B, 2 * g, C, D]``.
        spans: one per row, all of T inputs.
        heads: h.
        scaling: of the scores.

    Returns:
        ``[N, h * D]``.
    """
    both = cache.shape[1]
    width = qkv.shape[0] // len(spans)
    results = []
    for row, span in enumerate(spans):
        mine = qkv if len(spans) == 1 else qkv.narrow(0, row * width, width)
        stored = cache[row]
        stored.index_copy_(1, span.columns, mine.narrow(1, heads, both).transpose(0, 1))
        keys, values = stored.narrow(1, 0, span.seen).unsqueeze(0).chunk(2, 1)
        queries = mine.narrow(1, 0, heads).transpose(0, 1).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=span.mask,
            is_causal=span.causal,
            scale=scaling,
            enable_gqa=heads * 2 != both,
        )
        results.append(mixed[0].transpose(0, 1).reshape(width, -1))
    return results[0] if len(results) == 1 else torch.cat(results)
