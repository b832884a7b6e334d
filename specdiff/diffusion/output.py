"""What native decoding returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from specdiff.diffusion.loop import Finished


@dataclass
class DiffusionStats:
    """Counts of one call.

    Attributes:
        nfe: per row, denoiser passes it took part in.
        passes: denoiser passes of the whole batch.
        new_tokens: per row, tokens returned (end token included, padding not).
        tokens_per_pass: per row, ``new_tokens / nfe``; None if nothing was computed.
        blocks: per row, blocks opened.
        finish_reason: per row: "eos", "stop" or "length".
        seconds: wall time.
        notes: approximations and fallbacks in force.
    """

    nfe: list[int] = field(default_factory=list)
    passes: int = 0
    new_tokens: list[int] = field(default_factory=list)
    tokens_per_pass: list[float | None] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    finish_reason: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass
class DiffusionOutput(ModelOutput):
    """Output of :meth:`specdiff.DiffusionLM.generate` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``Long[B, prompt + new]``, prompts as given, padding after the end of a row.
        confidence: ``float32[B, new]`` confidence of each new token when it was committed; 0 in padding.
        stats: :class:`DiffusionStats`.
        trajectory: per pass, ``Long[B, new]`` tokens and ``Bool[B, new]`` noise, if asked for.
    """

    sequences: Tensor | None = None
    confidence: Tensor | None = None
    stats: DiffusionStats | None = None
    trajectory: tuple[tuple[Tensor, Tensor], ...] | None = None


def stats_of(finished: Finished, counts: list[int]) -> DiffusionStats:
    """Counts per row, in the caller's order; ``counts`` are the new tokens."""
    order = sorted(finished.place)
    ends = [finished.row(r) for r in order]
    nfe = [int(state.passes[i]) for state, i in ends]
    return DiffusionStats(
        nfe=nfe,
        passes=finished.passes,
        new_tokens=counts,
        tokens_per_pass=[c / n if n else None for c, n in zip(counts, nfe, strict=True)],
        blocks=[int(state.block[i]) + 1 for state, i in ends],
        finish_reason=[finished.reason[r] for r in order],
    )


def collect(input_ids: Tensor, finished: Finished, pad: int) -> DiffusionOutput:
    """Sequences and counts of all rows: prompts as given, new tokens, ``pad`` behind a row's end."""
    texts, sure = [], []
    for row in range(len(input_ids)):
        end, i = finished.row(row)
        first, stop = int(end.first[i]), finished.stop[row]
        texts.append(end.canvas.ids[i, first:stop])
        sure.append(end.canvas.confidence[i, first:stop].float())
    width = max((len(t) for t in texts), default=0)
    new = input_ids.new_full((len(texts), width), pad)
    confidence = torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        new[row, : len(text)] = text
        confidence[row, : len(text)] = sure[row].cpu()
    return DiffusionOutput(
        sequences=torch.cat([input_ids, new], dim=1),
        confidence=confidence,
        stats=stats_of(finished, [len(t) for t in texts]),
    )
