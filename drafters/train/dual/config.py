"""Noise, attention and loss of a dual-mode run; and the schedules that depend on progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdiff.errors import InvalidInputError


@dataclass(frozen=True)
class DualConfig:
    """Options of the objective. The defaults are the recipe of the shipped adapter.

    Attributes:
        block_sizes: sizes of noisy blocks, one drawn per step.
        wsd: shares of the run (warm-up, decay) of the block-size schedule: in the first the largest size grows by
            doubling from 2, in the second it falls back to the smallest of ``block_sizes``.
        drafting: share of blocks that are masked as a whole.
        band: mask ratios of the other blocks are uniform in it.
        level: who shares a mask ratio: "block" or "sequence".
        complement: every partly masked block comes twice, the second time with the other tokens masked.
        length: tokens per row; longer documents are cut there.
        pack: short documents share a row, without seeing one another.
        annealing: share of the run in which attention within a block goes from causal to bidirectional; 0: at once.
        inverse_rate: partly masked blocks weigh 1/t (the diffusion bound of log-likelihood).
        gamma: drafting weights are ``exp(-(k - 1) / gamma)`` for the k-th trained slot.
        hard: cross-entropy on the document's token, on top of KL to the model's own law.
        confidence: weight of the entropy of laws whose top token is right (CAP); 0: none.
    """

    block_sizes: tuple[int, ...] = (4, 8)
    wsd: tuple[float, float] = (0.0, 0.0)
    drafting: float = 0.5
    band: tuple[float, float] = (0.3, 1.0)
    level: str = "block"
    complement: bool = True
    length: int = 256
    pack: bool = True
    annealing: float = 0.0
    inverse_rate: bool = False
    gamma: float = 4.0
    hard: float = 0.3
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if not self.block_sizes or min(self.block_sizes) < 2:
            raise InvalidInputError(
                f"block sizes must be at least 2 (the first token of a block is the causal model's), not "
                f"{self.block_sizes}"
            )
        if self.length <= max(self.block_sizes):
            raise InvalidInputError(f"length {self.length} must be more than a block of {max(self.block_sizes)}")
        if not 0 < self.band[0] <= self.band[1] <= 1:
            raise InvalidInputError(f"the band of mask ratios needs 0 < low <= high <= 1, not {self.band}")
        if self.level not in ("block", "sequence"):
            raise InvalidInputError(f"level must be block or sequence, not {self.level!r}")
        for name, share in (("drafting", self.drafting), ("annealing", self.annealing), ("wsd", sum(self.wsd))):
            if not 0 <= share <= 1:
                raise InvalidInputError(f"{name} must be a share in [0, 1], not {getattr(self, name)}")
        if min(self.wsd) < 0 or self.gamma <= 0 or self.hard < 0 or self.confidence < 0:
            raise InvalidInputError("wsd, hard and confidence must not be negative, gamma must be positive")


def largest_block(config: DualConfig, progress: float) -> int:
    """Upper limit of block sizes at ``progress`` in [0, 1]: warm-up, stable, decay (LLaDA2.0's schedule)."""
    top, last = max(config.block_sizes), min(config.block_sizes)
    warm, decay = config.wsd
    if progress < warm:
        stages = max(math.ceil(math.log2(top)), 1)
        return min(2 ** (1 + int(progress / warm * stages)), top)
    if decay and progress >= 1 - decay:
        stages = max(math.ceil(math.log2(top / last)), 1)
        return max(top // 2 ** (1 + int((progress - 1 + decay) / decay * stages)), last)
    return top


def openness(config: DualConfig, progress: float) -> float:
    """Share of later positions of its block that a noisy position sees: 0 causal, 1 full (DiffuLLaMA's annealing)."""
    return 1.0 if not config.annealing else min(progress / config.annealing, 1.0)
