"""From what a caller gives (padded batches, spans, words) to a canvas of left-aligned rows, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdiff.diffusion.canvas import Canvas
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.visibility import block_floor
from specdiff.errors import InvalidInputError
from specdiff.verify.noise import Noise, row_seeds

Span = Mapping[int, Sequence[int]]
"""Offset in the generated part (negative: from its end) -> ids that stand there."""


def compact(ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Take the padding out of a batch.

    Args:
        ids: ``Long[B, P]``, padded on either side.
        attention_mask: ``[B, P]`` 1 where real, or None.

    Returns:
        ``Long[B, P']`` left-aligned ids (0 in padding), ``Long[B]`` lengths, ``Long[B, P']`` source column of each.
    """
    if ids.dim() != 2:
        raise InvalidInputError(f"input_ids must be [batch, length], got shape {tuple(ids.shape)}")
    if attention_mask is None:
        column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return ids.clone(), ids.new_full((ids.shape[0],), ids.shape[1]), column
    if attention_mask.shape != ids.shape:
        raise InvalidInputError(
            f"attention_mask {tuple(attention_mask.shape)} must have the shape of input_ids {tuple(ids.shape)}"
        )
    real = attention_mask.to(torch.bool)
    length = real.sum(-1)
    order = torch.argsort((~real).to(torch.uint8), dim=-1, stable=True)[:, : int(length.max()) if len(ids) else 0]
    inside = torch.arange(order.shape[1], device=ids.device) < length[:, None]
    return torch.where(inside, ids.gather(1, order), 0), length, order


def make_noise(
    rows: int, seed: int | Sequence[int] | None, generator: torch.Generator | None, device: torch.device
) -> Noise:
    """Seeds of a call: an int for all rows, a list with one each, or one drawn from torch's generator."""
    if seed is None:
        seed = int(torch.randint(0, 2**62, (), generator=generator, dtype=torch.long))
    if isinstance(seed, int):
        return Noise(row_seeds(seed, rows, device))
    if len(seed) != rows:
        raise InvalidInputError(f"seed has {len(seed)} entries for {rows} rows")
    return Noise(torch.tensor(list(seed), dtype=torch.long, device=device))


def generation_canvas(
    spec: DLMSpec, prompt: Tensor, lengths: Tensor, new: int, fixed: Sequence[Span]
) -> tuple[Canvas, Tensor, Tensor]:
    """A canvas of prompts followed by noise.

    Args:
        spec: the model; blocks that reach past ``new`` tokens are laid out whole unless attention is full.
        prompt: ``Long[B, P]`` left-aligned.
        lengths: ``Long[B]``.
        new: tokens to generate.
        fixed: per row, spans that stand in the generated part.

    Returns:
        the canvas, ``Long[B]`` first and ``Long[B]`` one past the last position to return.
    """
    first = lengths.clone()
    limit = lengths + new
    total = limit.clone()
    if spec.attention != "full" and spec.block_size is not None and new:
        origin = torch.zeros_like(first) if spec.alignment == "absolute" else first
        total = block_floor(limit - 1, origin, spec.block_size) + spec.block_size
    width = int(total.max())
    position = torch.arange(width, device=prompt.device)
    ids = prompt.new_full((prompt.shape[0], width), 0 if spec.mask_id is None else spec.mask_id)
    ids[:, : prompt.shape[1]] = prompt
    is_prompt = position < lengths[:, None]
    noisy = ~is_prompt & (position < total[:, None])
    if spec.mask_id is not None:
        ids = torch.where(noisy, spec.mask_id, ids)
    hold = torch.zeros_like(noisy)
    for row, spans in enumerate(fixed):
        for offset, tokens in spans.items():
            begin = offset if offset >= 0 else new + offset
            if begin < 0 or begin + len(tokens) > new:
                raise InvalidInputError(
                    f"fixed span at {offset} with {len(tokens)} tokens lies outside the {new} tokens to generate"
                )
            at = int(first[row]) + begin
            where = slice(at, at + len(tokens))
            ids[row, where] = torch.as_tensor(list(tokens), dtype=torch.long, device=ids.device)
            hold[row, where] = True
    noisy = noisy & ~hold
    return Canvas.build(ids, noisy, hold | is_prompt, is_prompt, total), first, limit


def infill_canvas(spec: DLMSpec, ids: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Canvas, Tensor, Tensor]:
    """A canvas whose noisy positions are those of ``mask``: ``Bool[B, N]`` (left-aligned); all others are fixed."""
    position = torch.arange(ids.shape[1], device=ids.device)
    noisy = mask & (position < lengths[:, None])
    first = torch.where(noisy, position, lengths[:, None]).min(-1).values
    canvas_ids = ids.clone() if spec.mask_id is None else torch.where(noisy, spec.mask_id, ids)
    is_prompt = position < first[:, None]
    return Canvas.build(canvas_ids, noisy, ~noisy, is_prompt, lengths.clone()), first, lengths.clone()


def per_row(spans: Span | Sequence[Span] | None, rows: int) -> list[Span]:
    """One mapping per row: one for all, or a list."""
    if spans is None:
        return [{}] * rows
    if isinstance(spans, Mapping):
        return [spans] * rows
    if len(spans) != rows:
        raise InvalidInputError(f"fixed has {len(spans)} entries for {rows} rows")
    return list(spans)
