"""The published layouts by the book, in plain torch: no cache, no batches, one head and one slot at a time.

Reads files as they lie on disk (or dictionaries of that shape) and shares no code with specdiff.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Half-split rotary embedding of one head's vector."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def convolve(z: Tensor, source: Tensor, base: Tensor, projection: Tensor, side: int, group: int) -> Tensor:
    """DFlash 2's causal convolution over slots; the dynamic part of the kernel comes from ``source``."""
    taps, hidden = base.shape[1:]
    dynamic = (source @ projection.T).view(len(z), 2, taps, hidden // group)[:, side]
    out = torch.zeros_like(z)
    for s in range(len(z)):
        for t in range(min(taps, s + 1)):
            for c in range(hidden):
                out[s, c] += (base[side, t, c] + dynamic[s, t, c // group]) * z[s - t, c]
    return out


class Block:
    """One block of a z-lab drafter.

    Args:
        folder: the checkpoint.
        model: the target.
        kinds: ``(causal, window or None)`` by layer; default full and bidirectional.
        names: renames of parameters, on disk to z-lab's.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        kinds: Sequence[tuple[bool, int | None]] | None = None,
        names: Callable[[str], str] = str,
    ) -> None:
        self.values = json.loads((folder / "config.json").read_text())
        self.weights = {names(k): v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.model = model
        layer = self.values.get("transformer_layer_config") or self.values
        self.layer = layer
        self.kinds = kinds or [(False, None)] * layer["num_hidden_layers"]
        self.eps = layer["rms_norm_eps"]
        self.theta = (layer.get("rope_parameters") or layer)["rope_theta"]

    @torch.no_grad()
    def states(self, ids: Sequence[int], block: Sequence[int], taps: Sequence[int], scale: float = 1.0) -> Tensor:
        """Normed states ``[S, H]`` of ``block`` after the committed ``ids``; ``taps`` index ``hidden_states``."""
        w = self.weights
        out = self.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        context = rms(
            torch.cat([out.hidden_states[i][0] for i in taps], -1) @ w["fc.weight"].T, w["hidden_norm.weight"], self.eps
        )
        x = self.model.get_input_embeddings().weight[torch.tensor(list(block))] * scale
        for i, (causal, window) in enumerate(self.kinds):
            layer = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
            x = x + self.half(layer, x, "input_layernorm", "attention_conv", lambda h, layer=layer, causal=causal,
                              window=window: self.attend(layer, h, context, causal, window))  # fmt: skip
            x = x + self.half(layer, x, "post_attention_layernorm", "mlp_conv", lambda h, layer=layer: (
                torch.nn.functional.silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
            ) @ layer["mlp.down_proj.weight"].T)  # fmt: skip
        return rms(x, w["norm.weight"], self.eps)

    def half(
        self, layer: dict[str, Tensor], x: Tensor, norm: str, conv: str, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        h = rms(x, layer[f"{norm}.weight"], self.eps)
        if f"{conv}.base_kernel" not in layer:
            return run(h)
        base, projection = layer[f"{conv}.base_kernel"], layer[f"{conv}.kernel_projection.weight"]
        group = 2 * base.shape[1] * base.shape[2] // len(projection)
        return convolve(run(convolve(h, h, base, projection, 0, group)), h, base, projection, 1, group)

    def attend(self, layer: dict[str, Tensor], x: Tensor, context: Tensor, causal: bool, window: int | None) -> Tensor:
        heads, groups, d = (self.layer[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        seen, first = torch.cat([context, x]), len(context)
        q = (x @ layer["self_attn.q_proj.weight"].T).view(-1, heads, d)
        k = (seen @ layer["self_attn.k_proj.weight"].T).view(-1, groups, d)
        v = (seen @ layer["self_attn.v_proj.weight"].T).view(-1, groups, d)
        out = torch.zeros(len(x), heads, d)
        for s in range(len(x)):
            at = first + s
            mine = [
                j
                for j in range(len(seen))
                if (not causal or j <= at) and (window is None or (at - j < window and (causal or j - at < window)))
            ]
            for h in range(heads):
                g = h // (heads // groups)
                query = turn(rms(q[s, h], layer["self_attn.q_norm.weight"], self.eps), at, self.theta)
                keys = [turn(rms(k[j, g], layer["self_attn.k_norm.weight"], self.eps), j, self.theta) for j in mine]
                score = torch.stack([query @ key for key in keys]) / math.sqrt(d)
                out[s, h] = score.softmax(-1) @ v[mine, g]
        return out.flatten(1) @ layer["self_attn.o_proj.weight"].T


def selected(weights: dict[str, Tensor], logits: Tensor, state: Tensor, previous: int, top: int) -> Tensor:
    """DFlash 2's rescored logits of one slot: minus infinity but for the ``top`` candidates."""
    out = torch.full_like(logits, -math.inf)
    query = weights["candidate_selector.predecessor_codebook"][previous] * (
        weights["candidate_selector.hidden_projection.weight"] @ state
    )
    for c in logits.topk(top).indices.tolist():
        out[c] = logits[c] + query @ weights["candidate_selector.successor_codebook"][c]
    return out
