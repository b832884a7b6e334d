"""What a policy sees and what it answers. Policies are frozen, hold no state, and work on rows independently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion.draws import Draws
from specdiff.diffusion.sampling import Sampling, draw, probability
from specdiff.errors import InvalidInputError


@dataclass
class Frame:
    """The open block of ``A`` rows, before a pass.

    Attributes:
        noisy: ``Bool[A, N]``.
        editable: ``Bool[A, N]`` positions that may change: neither prompt nor fixed.
        start: ``Long[A]`` first position of the block.
        end: ``Long[A]`` one past it.
        sub: ``Bool[A, N]`` the first sub-block with noise in it (the whole block when there are no sub-blocks).
    """

    noisy: Tensor
    editable: Tensor
    start: Tensor
    end: Tensor
    sub: Tensor

    @property
    def inside(self) -> Tensor:
        """``Bool[A, N]`` the open block."""
        position = torch.arange(self.noisy.shape[1], device=self.noisy.device)
        return (position >= self.start[:, None]) & (position < self.end[:, None])


@dataclass
class View:
    """The columns (positions whose prediction was asked for) of ``A`` rows, after a pass; left to right.

    Attributes:
        positions: ``Long[A, W]`` logical positions.
        valid: ``Bool[A, W]`` real columns.
        ids: ``Long[A, W]`` tokens now.
        noisy: ``Bool[A, W]``.
        editable: ``Bool[A, W]``.
        confidence: ``float32[A, W]`` at commit.
        logits: float32 ``[A, W, V]``; refused ids at ``-inf``.
        step: ``Long[A]`` pass of the block, from 0.
        steps: ``Long[A]`` passes granted to the block.
        initial: ``Long[A]`` noisy positions when the block opened.
        draws: randomness of this pass.
        sampling: temperature and filters.
        memory: what the policy left in earlier passes of the block: ``[A]`` per row or ``[A, W]`` per position.
        ar_logits: for policies with ``needs_ar``: ``[A, W, V]`` of the AR model, given the proposal to the left.
    """

    positions: Tensor
    valid: Tensor
    ids: Tensor
    noisy: Tensor
    editable: Tensor
    confidence: Tensor
    logits: Tensor
    step: Tensor
    steps: Tensor
    initial: Tensor
    draws: Draws
    sampling: Sampling
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    ar_logits: Tensor | None = None
    _race: Tensor | None = field(default=None, init=False)

    @property
    def open(self) -> Tensor:
        """``Bool[A, W]`` columns that wait for a token."""
        return self.valid & self.noisy & self.editable

    @property
    def masks(self) -> Tensor:
        """``Long[A]`` their number."""
        return self.open.sum(-1)

    def propose(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``Long[A, W]``, their confidence ``[A, W]``, and the logits of the confidence law."""
        tokens, law = draw(self.logits, self.sampling, self.draws, self.positions)
        return tokens, probability(law, tokens), law

    def race(self) -> Tensor:
        """``float32[A, W, V]`` standard exponentials: the same ones for all that race with one noise in this pass."""
        if self._race is None:
            self._race = self.draws.race(self.positions, self.logits.shape[-1])
        return self._race


@dataclass
class Decision:
    """What to write.

    Attributes:
        ids: ``Long[A, W]`` tokens after the step.
        noisy: ``Bool[A, W]`` noise after the step.
        confidence: ``[A, W]`` confidence of what was written.
        keep_open: ``Bool[A]`` rows whose block stays open although nothing is noisy.
        close: ``Bool[A]`` rows whose block closes now, whatever is noisy.
        columns: per-position memory ``[A, W]``.
        rows: per-row memory ``[A]``.
    """

    ids: Tensor
    noisy: Tensor
    confidence: Tensor
    keep_open: Tensor | None = None
    close: Tensor | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


def committed(view: View, chosen: Tensor, tokens: Tensor, confidence: Tensor) -> Decision:
    """The decision that commits ``tokens`` at ``chosen``: ``Bool[A, W]`` and leaves the rest."""
    return Decision(
        ids=torch.where(chosen, tokens, view.ids),
        noisy=view.noisy & ~chosen,
        confidence=torch.where(chosen, confidence, view.confidence),
    )


@dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Class attributes:
        name: what users write.
        sticky: a committed token stays (no remasking, no editing), so that an EOS may end a row inside a block.
        corruption: the corruption it is made for.
        needs_ar: it also reads an AR model.
        per_block: ``steps`` counts per block, not per generation.
        own_law: it draws from a law of its own, so that temperature and filters are refused.

    Attributes:
        steps: denoising passes, or None for as many as needed.
    """

    name: ClassVar[str] = ""
    sticky: ClassVar[bool] = True
    corruption: ClassVar[str] = "mask"
    needs_ar: ClassVar[bool] = False
    per_block: ClassVar[bool] = False
    own_law: ClassVar[bool] = False

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise InvalidInputError(f"policy {self.name!r}: steps must be at least 1, not {self.steps}")
        self.check()

    def check(self) -> None:
        """Refuse options out of range."""

    @property
    def looks_at_draw(self) -> bool:
        """The choice of positions looks at the drawn token's own value (the usual confidence of the sampled token).

        Such a policy cannot state the law of its tokens; a drafter that uses it proposes ``Delta``.
        """
        return True

    def wants(self, frame: Frame) -> Tensor:
        """``Bool[A, N]`` positions whose prediction the policy reads: the noisy ones of the block."""
        return frame.noisy & frame.editable & frame.inside

    def granted(self, initial: Tensor, share: Tensor | None) -> Tensor:
        """``Long[A]`` steps of a block: its share of ``steps``, or one per token."""
        return initial.clamp(min=1) if share is None else share

    def decide(self, view: View) -> Decision:
        """Choose what to write. Pure."""
        raise NotImplementedError


def in_range(policy: Policy, name: str, low: float, high: float) -> None:
    """Raise unless ``low <= policy.name <= high``."""
    value = getattr(policy, name)
    if not low <= value <= high:
        raise InvalidInputError(f"policy {policy.name!r}: {name} must be in [{low:g}, {high:g}], not {value}")
