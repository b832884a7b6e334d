"""How many tokens each row may draft in the round that begins.

Lengths follow from measured costs and from what earlier rounds of the same request accepted, never from a token of the
round itself: each round's law stays exact whatever the lengths (a round's noise is fresh, so past verdicts say nothing
about it). With ``a_i`` the running chance that position i is kept once i - 1 was, a round of n drafted tokens brings
``1 + sum_i prod_{j<=i} a_j`` tokens and costs ``target(n + 1) + draft(n)``; the n with the most tokens per second is
taken, 0 (plain decoding) included. At the best n, each proposed position gains more than it costs.

A source that does not pay is left alone and tried again later, after twice as many rounds each time it fails. Over all
that stands a bill: a round may draft only if the request would still have cost at most 2.5% more than plain decoding,
prompt included, should everything be rejected.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdiff.drafters.base import Outlook
from specdiff.tuning.curve import CostCurve

BOUND = 0.05
"""How much more than plain decoding a request may cost."""
ALLOWANCE = 0.025
"""How much of that drafts may take, modelled: the model knows passes and drafts and not what lies between them."""
MEMORY = 0.9
"""How much of a position's evidence survives each new try."""
FIRST_WAIT, LONGEST_WAIT = 4, 64
"""Rounds after which a source that did not pay is tried again: at first, and at most."""
MOST_BEHIND = 1024
"""Positions that a lazy drafter lets wait before it projects them without a draft."""


class Lengths(Protocol):
    """Decides limits before a round, learns after it. One object per request."""

    adapts: bool
    """Whether :meth:`choose` looks at outlooks."""
    given_up: bool
    """Keeping the drafter's context is itself too dear: the loop should let go of it."""

    @property
    def modelled_cost(self) -> float | None:
        """What the request cost by the model, relative to plain decoding; None when nothing is modelled."""
        ...

    def begin(self, prompts: Sequence[int], lazy: bool) -> None:
        """Prompt tokens computed per row, and whether the drafter's commits cost nothing by themselves."""
        ...

    def choose(self, caps: Sequence[int], outlooks: Sequence[Outlook]) -> list[int]:
        """Most tokens to draft per active row, at most ``caps``."""
        ...

    def settle(self, proposed: Sequence[int], accepted: Sequence[int], emitted: Sequence[int]) -> None:
        """What the round did, per row that was active in it."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """The rows that go on."""
        ...

    def notes(self) -> list[str]:
        """What the request's statistics should say."""
        ...


class FixedLengths:
    """As long as the caps allow, always."""

    adapts = False
    given_up = False
    modelled_cost = None

    def begin(self, prompts: Sequence[int], lazy: bool) -> None:
        """Nothing to prepare."""

    def choose(self, caps: Sequence[int], outlooks: Sequence[Outlook]) -> list[int]:
        """The caps."""
        return list(caps)

    def settle(self, proposed: Sequence[int], accepted: Sequence[int], emitted: Sequence[int]) -> None:
        """Nothing to learn."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to select."""

    def notes(self) -> list[str]:
        """Nothing to say."""
        return []


@dataclass
class Record:
    """Running acceptance of one row's drafts from one source.

    Attributes:
        prior: chance of a position before anything is known.
        kept: evidence for each position: how often it was kept, fading.
        tried: how often its predecessors were kept and it was proposed, fading alike.
        idle: rounds since it last drafted.
        wait: rounds after which it is tried again although it did not pay.
    """

    prior: float
    kept: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    idle: int = 0
    wait: int = FIRST_WAIT

    def reach(self, most: int) -> list[float]:
        """Chance that a position is kept, for the first ``most``; as at the start when it is time to try again."""
        due = self.idle >= self.wait
        found, through, before = [], 1.0, self.prior
        for at in range(most):
            if at < len(self.tried) and not due:
                before = (self.kept[at] + before) / (self.tried[at] + 1.0)  # one try's worth of the position before
            through *= before
            found.append(through)
        return found

    def book(self, proposed: int, accepted: int) -> None:
        """A round in which this source drafted."""
        missing = proposed - len(self.tried)
        self.kept += [0.0] * missing
        self.tried += [0.0] * missing
        for at in range(min(proposed, accepted + 1)):
            self.kept[at] = MEMORY * self.kept[at] + (at < accepted)
            self.tried[at] = MEMORY * self.tried[at] + 1.0
        if accepted:
            self.wait = FIRST_WAIT
        elif self.idle >= self.wait:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.idle = 0


@dataclass(frozen=True)
class Plan:
    """One way to spend the round: limits per row, expected tokens of all rows, modelled seconds."""

    limits: tuple[int, ...]
    tokens: float
    seconds: float


class AdaptiveLengths:
    """Lengths by measured costs and running acceptance.

    Args:
        curve: what passes cost, for this number of rows.

    Attributes:
        spent: modelled seconds of the request so far.
        plain: modelled seconds that plain decoding would have taken for the same tokens.
    """

    adapts = True

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve.rising()
        self._target_at, self._drafter_at = (
            functools.cache(self.curve.target_at),
            functools.cache(self.curve.drafter_at),
        )
        self.spent = self.plain = 0.0
        self.rounds = self.drafting_rounds = 0
        self.given_up = False
        self._behind = 0
        self._lazy = True
        self._records: list[dict[str, Record]] = []
        self._outlooks: Sequence[Outlook] = ()
        self._limits: Sequence[int] = ()

    def begin(self, prompts: Sequence[int], lazy: bool) -> None:
        """Put the prompts on the bill; a lazy drafter's share of them is due with its first draft."""
        self._records = [{} for _ in prompts]
        self._lazy, self._behind = lazy, max(prompts)
        self.plain = self.curve.prefill * max(prompts)
        self.spent = self.plain
        if not lazy:
            self._keep_up()

    def _keep_up(self) -> None:
        self.spent += self.curve.warm * self._behind
        self._behind = 0

    # -- before a round ----------------------------------------------------------------------------------------------

    def choose(self, caps: Sequence[int], outlooks: Sequence[Outlook]) -> list[int]:
        """The affordable plan with the most tokens per second."""
        self._outlooks = outlooks
        most = [min(cap, outlook.most) for cap, outlook in zip(caps, outlooks, strict=True)]
        records = [held.setdefault(o.source, Record(o.chance)) for held, o in zip(self._records, outlooks, strict=True)]
        reach = [record.reach(n) for record, n in zip(records, most, strict=True)]
        plain = Plan((0,) * len(caps), float(len(caps)), self._target_at(1))
        best = plain
        for plan in self._plans(most, reach) if self._may_pay(plain, reach) else ():
            if plan.tokens * best.seconds > best.tokens * plan.seconds and self._affordable(plan):
                best = plan
        self._limits = best.limits
        return list(best.limits)

    def _may_pay(self, plain: Plan, reach: Sequence[Sequence[float]]) -> bool:
        """Whether all expected tokens would pay at the price of the cheapest plan; if not, no plan does."""
        tokens = plain.tokens + sum(map(sum, reach))
        free = any(outlook.free for outlook in self._outlooks)
        cheapest = self._target_at(2) + (0.0 if free else self._drafter_at(1))
        return tokens * plain.seconds > plain.tokens * cheapest

    def _plans(self, most: Sequence[int], reach: Sequence[Sequence[float]]) -> list[Plan]:
        """Every width, with and without the rows whose drafts cost a drafter pass."""
        free = [outlook.free for outlook in self._outlooks]
        plans: dict[tuple[int, ...], Plan] = {}
        for width in range(1, max(most, default=0) + 1):
            for paid in (False, True):
                limits = tuple(min(width, n) if paid or f else 0 for n, f in zip(most, free, strict=True))
                if any(limits) and limits not in plans:
                    tokens = sum(1.0 + sum(chances[:n]) for n, chances in zip(limits, reach, strict=True))
                    plans[limits] = Plan(limits, tokens, self._seconds(limits, max(limits)))
        return list(plans.values())

    def _seconds(self, limits: Sequence[int], width: int) -> float:
        """A round that was allowed ``limits`` and put ``width`` drafts before the target."""
        drafted = max((n for n, o in zip(limits, self._outlooks, strict=True) if not o.free), default=0)
        return self._target_at(width + 1) + self._drafter_at(drafted)

    def _affordable(self, plan: Plan) -> bool:
        behind = self.curve.warm * self._behind if self._drafts(plan.limits) else 0.0
        worst = self.spent + plan.seconds + behind
        return worst <= (1.0 + ALLOWANCE) * (self.plain + self._target_at(1))

    def _drafts(self, limits: Sequence[int]) -> bool:
        """Whether a drafter pass runs, which first catches up with what was committed."""
        return any(n and not o.free for n, o in zip(limits, self._outlooks, strict=True))

    # -- after a round -----------------------------------------------------------------------------------------------

    def settle(self, proposed: Sequence[int], accepted: Sequence[int], emitted: Sequence[int]) -> None:
        """Bill the round, and learn from it."""
        one = self._target_at(1)
        self.rounds += 1
        self.drafting_rounds += any(proposed)
        self.spent += self._seconds(self._limits, max(proposed))
        self.plain += one * sum(emitted) / len(emitted)
        if self._drafts(self._limits):
            self._keep_up()
        elif not self.given_up:
            self._behind += max(emitted)
        if self._behind >= (MOST_BEHIND if self._lazy else 1):
            self._keep_up()
            self.given_up = self.spent + one + self.curve.warm > (1.0 + BOUND) * (self.plain + one)
        for held, outlook, length, kept in zip(self._records, self._outlooks, proposed, accepted, strict=False):
            record = held[outlook.source]
            if length:
                record.book(length, kept)
            elif outlook.most:
                record.idle += 1
        self._outlooks, self._limits = (), ()

    def select(self, rows: Sequence[int]) -> None:
        """Keep ``rows``."""
        self._records = [self._records[row] for row in rows]

    def notes(self) -> list[str]:
        """Whether the request was drafted."""
        if self.drafting_rounds == self.rounds:
            what = "drafted in every round"
        elif self.drafting_rounds:
            what = "some rounds were plain decoding"
        else:
            what = "plain decoding, drafting would not have paid"
        return [f"adaptive lengths: {what}"] if self.rounds else []

    @property
    def modelled_cost(self) -> float | None:
        """Modelled cost of the request relative to plain decoding."""
        return self.spent / self.plain if self.plain else None
