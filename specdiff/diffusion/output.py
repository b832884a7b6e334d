"""What native decoding returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from transformers.utils import ModelOutput


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
