"""Two drafters in one: prompt lookup where it promises more accepted tokens, another drafter elsewhere.

What a copy promises grows with the length of its match; how much it keeps of that promise differs by text and by
temperature, so every row keeps its own account of it, beside what the other drafter brought. The choice is made per row
and round, before anything is drawn, from match lengths and from earlier rounds only; so the chosen drafter's law stays
what it says. Lookup's tokens are marked in ``Proposal.delta``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Outlook, as_limits, move_drafter, rebind
from specdiff.drafters.lookup import LookupSession, PromptLookup, copied
from specdiff.errors import InvalidInputError
from specdiff.verify.laws import Delta, Proposal, Sampled
from specdiff.verify.noise import RoundNoise

MEMORY = 0.8
"""How much of the running averages survives each round."""
PROMISE = (1.0, 0.65)
"""A match of n tokens promises ``1.0 + 0.65 n`` accepted ones: what greedy chats of the default target keep."""
COPIES = 16
"""Tokens that a copy may have. Where lengths adapt, costs decide how many of them are drafted."""
LONGEST = 12
"""Matches past this length promise no more."""
WEIGHT = 3.0
"""Tokens of kept promise that every row starts with."""
FORGIVE = 0.05
"""Share of that start which each round of the other drafter gives back: a source that failed is tried again."""


def promise(match: int) -> float:
    """Accepted tokens that a copy is expected to bring after a match of ``match`` tokens."""
    return PROMISE[0] + PROMISE[1] * min(match, LONGEST)


class CombinedDrafter:
    """Prompt lookup beside another drafter.

    Args:
        drafter: who drafts where there is nothing to copy.
        lookup: the copier (default: blocks as long as the drafter's, at least :data:`COPIES`).
        match: shortest match that lets the copier draft.
    """

    def __init__(self, drafter: Drafter, lookup: PromptLookup | None = None, match: int = 2) -> None:
        if match < 1:
            raise InvalidInputError(f"match must be at least 1, not {match}")
        self.drafter, self.match = drafter, match
        self.lookup = lookup or PromptLookup(block_size=max(COPIES, drafter.block_size))
        self.block_size = max(drafter.block_size, self.lookup.block_size)
        self.taps: Sequence[int] = tuple(drafter.taps)

    def cost_key(self) -> list[Any] | None:
        """What its cost depends on; None when the drafter inside does not say."""
        key = getattr(self.drafter, "cost_key", None)
        found = key() if key is not None else None
        return None if found is None else [type(self.drafter).__name__, found, *self.lookup.cost_key()]

    def start(self, request: DraftRequest) -> CombinedSession:
        """Open the state for one call of ``generate``."""
        return CombinedSession(self, request)

    def to(self, *args: Any, **kwargs: Any) -> CombinedDrafter:
        """Move the drafter inside, where it can be moved."""
        move_drafter(self.drafter, *args, **kwargs)
        return self

    def bind(self, target: Any) -> CombinedDrafter:
        """Bind the drafter inside to ``target``, where it is bound to one."""
        rebind(self.drafter, target)
        return self


@dataclass
class Record:
    """One row's account of both sources.

    Attributes:
        promised: tokens that copies promised, a running sum.
        kept: tokens that they brought, likewise.
        drafted: tokens that a round of the other drafter brings, a running average.
        open: what the round under way promised if it copies, 0 if it drafts, None between rounds.
    """

    promised: float = WEIGHT
    kept: float = WEIGHT
    drafted: float = 1.0
    open: float | None = field(default=None)

    def prefers_copy(self, match: int) -> bool:
        """Whether a copy after a match of this length promises at least as much as the other drafter has brought."""
        return self.kept * promise(match) >= self.drafted * self.promised

    def begin(self, promised: float) -> None:
        """Note a round's source: a copy that promises so many tokens, or (0) the other drafter."""
        self.open = promised

    def settle(self, accepted: int) -> None:
        """Book a round's accepted tokens to the source that drafted it."""
        if self.open is None:
            return
        if self.open:
            self.promised = MEMORY * self.promised + self.open
            self.kept = MEMORY * self.kept + accepted
        else:
            self.drafted = MEMORY * self.drafted + (1 - MEMORY) * accepted
            self.promised += FORGIVE * WEIGHT
            self.kept += FORGIVE * WEIGHT
        self.open = None


class CombinedSession:
    """Both sessions, and a :class:`Record` for every row."""

    def __init__(self, owner: CombinedDrafter, request: DraftRequest) -> None:
        self._owner = owner
        self._request = request
        self._lookup = LookupSession(owner.lookup, request)
        self._inner: DraftSession = owner.drafter.start(request)
        self._records = [Record() for _ in range(request.batch_size)]

    @property
    def request(self) -> DraftRequest:
        """The request in force; both inner sessions follow it."""
        return self._request

    @request.setter
    def request(self, request: DraftRequest) -> None:
        self._request = request
        self._lookup.request = request
        self._inner.request = request

    @property
    def lazy(self) -> bool:
        """Whether commits cost nothing by themselves."""
        return getattr(self._inner, "lazy", False)

    @property
    def notes(self) -> list[str]:
        """What the drafter inside has to say."""
        return getattr(self._inner, "notes", [])

    def outlook(self, anchor: Tensor) -> list[Outlook]:
        """Who would draft each row now."""
        look = getattr(self._inner, "outlook", None)
        own = look(anchor) if look else [Outlook("drafted", self._owner.drafter.block_size)] * len(anchor)
        found = self._lookup.matches(anchor)
        return [
            copied(length, len(tokens)) if chosen else inner
            for (length, tokens), chosen, inner in zip(found, self._copies(found), own, strict=True)
        ]

    def _copies(self, found: Sequence[tuple[int, Sequence[int]]]) -> list[bool]:
        """Which rows copy: their match is long enough, and a copy promises no less than a draft."""
        return [
            length >= self._owner.match and record.prefers_copy(length)
            for (length, _), record in zip(found, self._records, strict=True)
        ]

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """Copied tokens for rows with a promising match, the drafter's own for the others."""
        limits = as_limits(limits, self._owner.block_size)
        found = self._lookup.matches(anchor)
        copy = self._copies(found)
        for record, copies, (length, _), limit in zip(self._records, copy, found, limits.tolist(), strict=True):
            if limit:
                record.begin(min(promise(length), limit) if copies else 0.0)
        if all(copy):
            return self._lookup.propose(anchor, limits, noise)
        chosen = torch.tensor(copy, device=anchor.device)
        drafts = self._inner.propose(anchor, torch.where(chosen, 0, limits), noise)
        return merge(drafts, [tokens for _, tokens in found], chosen, limits)

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Pass on, and book what the last round brought."""
        self._lookup.commit(tokens, counts, taps)
        self._inner.commit(tokens, counts, taps)
        for record, count in zip(self._records, counts.tolist(), strict=True):
            record.settle(max(count - 1, 0))

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``, in that order."""
        self._lookup.select(rows)
        self._inner.select(rows)
        self._records = [self._records[r] for r in rows.tolist()]

    def rollback(self, lengths: Tensor) -> None:
        """Forget tokens past ``lengths``."""
        self._lookup.rollback(lengths)
        self._inner.rollback(lengths)
        for record in self._records:
            record.open = None

    def close(self) -> None:
        """Close both sessions."""
        self._lookup.close()
        self._inner.close()


def merge(drafts: Proposal, copies: Sequence[Sequence[int]], chosen: Tensor, limits: Tensor) -> Proposal:
    """One proposal of two: rows where ``chosen``: ``Bool[B]`` take their copy, as ``Delta``.

    Args:
        drafts: the drafter's proposal.
        copies: copied tokens by row.
        chosen: which rows copy.
        limits: ``Long[B]`` most tokens per row.
    """
    copied = torch.tensor([len(c) for c in copies], device=limits.device)
    lengths = torch.where(chosen, torch.minimum(limits, copied), drafts.lengths)
    width = int(lengths.max())
    table = [list(c[:width]) + [0] * (width - len(c[:width])) for c in copies]
    rows = torch.tensor(table, dtype=torch.long, device=limits.device).view(len(copies), width)

    def fit(value: Tensor) -> Tensor:
        extra = width - value.shape[1]
        if extra <= 0:
            return value[:, :width]
        return torch.cat([value, value.new_zeros(value.shape[0], extra, *value.shape[2:])], 1)

    tokens = torch.where(chosen[:, None], rows, fit(drafts.tokens))
    if drafts.law == Delta():
        return Proposal(tokens, lengths, Delta())
    delta: Tensor | None = None
    if drafts.law == Sampled():
        own = torch.zeros_like(tokens, dtype=torch.bool) if drafts.delta is None else fit(drafts.delta)
        delta = own | chosen[:, None]
    logits = None if drafts.logits is None else fit(drafts.logits)
    written = None if drafts.written is None else fit(drafts.written)
    return Proposal(tokens, lengths, drafts.law, logits, drafts.draft_ids, written, delta)
