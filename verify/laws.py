"""Proposals and the laws they were drawn with.

A *law* says how the drafted tokens came about, which decides what an acceptance rule may assume about them.
For losslessness the ``q`` of an acceptance test must be the conditional law of the token given the tokens before it
and any randomness fixed before the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdiff.errors import InvalidInputError, UnsupportedError


class Law:
    """Base class of the three laws. Without state; classes and instances are interchangeable in arguments."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) or other is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class Sampled(Law):
    """Token ``x_i`` was drawn from ``softmax(logits_i)`` given only ``x_<i`` and randomness fixed before this draw."""


class Delta(Law):
    """Token ``x_i`` is any deterministic or draw-dependent choice (argmax, search, lookup). ``q`` is one-hot."""


class Coupled(Law):
    """``x_i = argmax(log q_i + g_i)`` with the very noise ``g`` that the target will use at that position."""


def as_law(law: Law | type[Law]) -> Law:
    """Return ``law`` as an instance; a class is instantiated."""
    if isinstance(law, type) and issubclass(law, Law) and law is not Law:
        return law()
    if isinstance(law, Law) and type(law) is not Law:
        return law
    raise InvalidInputError(f"law must be Sampled, Delta or Coupled, not {law!r}")


@dataclass(eq=False)
class Proposal:
    """A drafted block for every row of a batch.

    Attributes:
        tokens: ``Long[B, K]`` drafted target ids; entries at or past ``lengths`` are ignored.
        lengths: ``Long[B]`` number of drafted tokens per row, 0 to K.
        law: how the tokens were drawn (:class:`Sampled`, :class:`Delta` or :class:`Coupled`).
        logits: ``[B, K, Vd]`` exactly what was sampled from, after temperature and filters. Needed by ``Sampled``;
            never changed by the engine.
        draft_ids: ``Long[Vd]`` target id of each draft-vocabulary entry, when the drafter's vocabulary is pruned.
        written: ``Long[B, K]`` denoising step of each token's *final* write, for multi-step drafters. A token is
            *exposed* if any position to its left was written later; exposed tokens are tested as ``Delta``.
        delta: ``Bool[B, K]`` tokens of a ``Sampled`` proposal that must be tested as ``Delta`` (rows that come from
            another source, tokens re-used from a rejected block).
        parents: reserved for trees, refused until they exist.
    """

    tokens: Tensor
    lengths: Tensor
    law: Law = field(default_factory=Delta)
    logits: Tensor | None = None
    draft_ids: Tensor | None = None
    written: Tensor | None = None
    delta: Tensor | None = None
    parents: None = None

    def __post_init__(self) -> None:
        self.law = as_law(self.law)
        if self.parents is not None:
            raise UnsupportedError("Proposal.parents is reserved: tree proposals are not supported yet; leave it None")
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.long:
            raise InvalidInputError(
                f"Proposal.tokens must be Long[B, K], got {self.tokens.dtype} {tuple(self.tokens.shape)}"
            )
        batch, block = self.tokens.shape
        if self.lengths.shape != (batch,):
            raise InvalidInputError(f"Proposal.lengths must be Long[{batch}], got shape {tuple(self.lengths.shape)}")
        if self.law == Sampled() and self.logits is None and block:
            raise InvalidInputError("a Sampled proposal needs the logits its tokens were drawn from")
        if self.logits is not None and self.logits.shape[:2] != (batch, block):
            raise InvalidInputError(f"Proposal.logits must be [{batch}, {block}, Vd], got {tuple(self.logits.shape)}")
        if self.draft_ids is not None and (self.logits is None or self.draft_ids.shape != (self.logits.shape[-1],)):
            raise InvalidInputError("Proposal.draft_ids must be Long[Vd], one target id per column of logits")
        for name in ("written", "delta"):
            value = getattr(self, name)
            if value is not None and value.shape != (batch, block):
                raise InvalidInputError(f"Proposal.{name} must be [{batch}, {block}], got {tuple(value.shape)}")

    @property
    def block(self) -> int:
        """K, the width of ``tokens``."""
        return self.tokens.shape[1]

    def narrowed(self, width: int) -> Proposal:
        """The first ``width`` slots; every length must be at most that."""

        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[:, :width]

        return Proposal(
            self.tokens[:, :width], self.lengths, self.law, cut(self.logits), self.draft_ids, cut(self.written),
            cut(self.delta),
        )  # fmt: skip

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Proposal:
        """A proposal of no tokens at all: plain autoregressive decoding."""
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(tokens=zeros[:, None][:, :0], lengths=zeros, law=Delta())


@dataclass
class Verdict:
    """What a rule decided.

    Attributes:
        accepted: ``Long[B]`` number of drafted tokens kept per row.
        next_token: ``Long[B]`` the token that follows the kept ones.
        bad: ``Bool[B]`` rows with a target row that was needed and is NaN, +inf or all -inf.
    """

    accepted: Tensor
    next_token: Tensor
    bad: Tensor
