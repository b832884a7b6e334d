"""Tabular targets and drafters, small enough that every proposal and its probability can be listed.

A drafter lists its proposals as :class:`Draft` objects. The biased ones are the negative controls of the audit: ways to
draft that look right and are not.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import torch

from specdiff.verify.laws import Delta, Law, Sampled

Path = tuple[int, ...]
Row = tuple[float, ...]
"""Logits or probabilities of one position, as plain floats (they are hashed and compared)."""

NEG_INF = float("-inf")


@lru_cache(maxsize=1 << 16)
def softmax(logits: Row) -> Row:
    """Probabilities of a row of logits, in float64."""
    return tuple(torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0).tolist())


def temperature(value: float) -> Callable[[Row], Row]:
    """Warp that divides logits by ``value``."""
    return lambda logits: tuple(x / value for x in logits)


def top_k(count: int) -> Callable[[Row], Row]:
    """Warp that keeps the ``count`` largest logits (ties of the last one too)."""
    return lambda logits: tuple(x if x >= sorted(logits)[-count] else NEG_INF for x in logits)


def top_p(mass: float) -> Callable[[Row], Row]:
    """Warp that keeps the smallest set of likeliest ids whose probability reaches ``mass``."""

    def warp(logits: Row) -> Row:
        law = softmax(logits)
        order = sorted(range(len(law)), key=lambda v: -law[v])
        kept: set[int] = set()
        total = 0.0
        for v in order:
            if total >= mass:
                break
            kept.add(v)
            total += law[v]
        return tuple(x if v in kept else NEG_INF for v, x in enumerate(logits))

    return warp


@dataclass
class TableLM:
    """A random next-token law for every prefix: the target of an audit.

    Attributes:
        vocab: number of ids.
        seed: chooses the table.
        spread: standard deviation of the logits.
        zeros: chance that an id is impossible after a prefix (never all of them).
        warp: applied to every row of logits.
    """

    vocab: int
    seed: int
    spread: float = 1.2
    zeros: float = 0.0
    warp: Callable[[Row], Row] = tuple
    _rows: dict[object, Row] = field(default_factory=dict, repr=False)

    def scores(self, key: object) -> Row:
        """Warped logits after the prefix ``key`` (any hashable object with a stable ``repr``)."""
        if key not in self._rows:
            draw = random.Random(f"{self.seed}:{key!r}")
            row = [draw.gauss(0.0, self.spread) for _ in range(self.vocab)]
            allowed = draw.randrange(self.vocab)
            impossible = [v != allowed and draw.random() < self.zeros for v in range(self.vocab)]
            self._rows[key] = self.warp(tuple(NEG_INF if gone else x for x, gone in zip(row, impossible, strict=True)))
        return self._rows[key]

    def law(self, key: object) -> Row:
        """Probabilities after the prefix ``key``."""
        return softmax(self.scores(key))


@dataclass(frozen=True)
class Draft:
    """One proposal that a drafter may make.

    Attributes:
        probability: of this very proposal (and whatever else it carries), given the committed tokens.
        tokens: drafted target ids; fewer than the block size makes a ragged row.
        logits: one row per token, None for laws that need none.
        written, delta: as in :class:`specdiff.verify.laws.Proposal`.
    """

    probability: float
    tokens: Path
    logits: tuple[Row, ...] | None = None
    written: Path | None = None
    delta: tuple[bool, ...] | None = None


@dataclass
class TableDrafter:
    """A drafter made of a table and a procedure that lists its proposals.

    Attributes:
        table: denoiser: a row of logits per (committed tokens, canvas, position).
        block: most tokens in a proposal.
        procedure: one of the functions below.
        law: the law that is claimed for the proposals.
        draft_ids: target id of each of the table's ids, for a pruned vocabulary.
    """

    table: TableLM
    block: int
    procedure: Callable[[TableDrafter, Path], Iterator[Draft]]
    law: Law = field(default_factory=Sampled)
    draft_ids: tuple[int, ...] | None = None

    def drafts(self, prefix: Path) -> list[Draft]:
        """All different proposals after ``prefix``; probabilities sum to 1."""
        merged: dict[Draft, float] = defaultdict(float)
        for draft in self.procedure(self, prefix):
            if draft.probability > 0:
                merged[replace(draft, probability=1.0)] += draft.probability
        found = [replace(draft, probability=chance) for draft, chance in merged.items()]
        if self.draft_ids is None:
            return found
        return [replace(d, tokens=tuple(self.draft_ids[t] for t in d.tokens)) for d in found]

    def row(self, prefix: Path, canvas: Sequence[int | None], position: int) -> Row:
        """Logits of ``position`` given the tokens on the canvas (None: masked)."""
        return self.table.scores((prefix, tuple(canvas), position))


def one_step(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """All positions drawn at once from the marginals of one pass."""
    rows = _marginals(drafter, prefix, [None] * drafter.block)
    for tokens, chance in _draws([softmax(r) for r in rows]):
        yield Draft(chance, tokens, rows)


def ragged(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """As :func:`one_step`, with a length chosen from the committed tokens and then cut *after* an unlikely token."""
    for draft in one_step(drafter, prefix):
        limit = (sum(prefix) + len(prefix)) % (drafter.block + 1)
        length = next((i + 1 for i, t in enumerate(draft.tokens) if _chance(draft, i, t) < 0.3), drafter.block)
        yield _cut(draft, min(limit, length))


def truncated_before(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """Biased: cut *before* a token that came out with low probability."""
    for draft in one_step(drafter, prefix):
        yield _cut(draft, next((i for i, t in enumerate(draft.tokens) if _chance(draft, i, t) < 0.3), drafter.block))


def in_order(choose: str, declare: bool = False) -> Callable[[TableDrafter, Path], Iterator[Draft]]:
    """One position per step, each drawn given the canvas so far, with the law of that step as its ``q``.

    Args:
        choose: "left", "right" (first), "confident" (largest probability of the law), or "drawn" (a token is drawn for
            every masked position, the one with the largest probability stays).
        declare: pass on ``written``, so that exposed tokens are tested as Delta.
    """

    def procedure(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
        size = drafter.block

        def step(
            canvas: list[int | None], rows: dict[int, Row], written: dict[int, int], chance: float
        ) -> Iterator[Draft]:
            masked = [i for i in range(size) if canvas[i] is None]
            if not masked:
                when = tuple(written[i] for i in range(size))
                yield Draft(
                    chance, tuple(t for t in canvas if t is not None), tuple(rows[i] for i in range(size)),
                    written=when if declare else None,
                )  # fmt: skip
                return
            fresh = {i: drafter.row(prefix, canvas, i) for i in masked}
            laws = {i: softmax(fresh[i]) for i in masked}
            for position, token, share in _positions(choose, masked, laws):
                after = [token if i == position else t for i, t in enumerate(canvas)]
                seen = {**rows, position: fresh[position]}
                yield from step(after, seen, {**written, position: size - len(masked)}, chance * share)

        yield from step([None] * size, {}, {}, 1.0)

    return procedure


def redrawn_left(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """Biased: after a whole pass the first token is masked and drawn again, given the others."""
    for draft in one_step(drafter, prefix):
        again = drafter.row(prefix, (None, *draft.tokens[1:]), 0)
        rows = (again, *(draft.logits or ())[1:])
        for token, share in enumerate(softmax(again)):
            yield Draft(draft.probability * share, (token, *draft.tokens[1:]), rows)


def redrawn_all(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """Tokens chosen by whatever means make a canvas; then every token is drawn anew from one last pass over it."""
    for draft in in_order("drawn")(drafter, prefix):
        rows = _marginals(drafter, prefix, draft.tokens)
        for tokens, chance in _draws([softmax(r) for r in rows]):
            yield Draft(draft.probability * chance, tokens, rows)


def argmax_path(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """The likeliest token of every position, left to right. Law Delta; biased if called Sampled."""
    canvas: list[int | None] = [None] * drafter.block
    rows, tokens = [], []
    for position in range(drafter.block):
        rows.append(drafter.row(prefix, canvas, position))
        tokens.append(max(range(drafter.table.vocab), key=lambda v: rows[-1][v]))
        canvas[position] = tokens[-1]
    yield Draft(1.0, tuple(tokens), tuple(rows))


def best_of_two(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """Two draws of the block, the likelier one is proposed. Law Delta; biased if called Sampled."""
    drafts = list(one_step(drafter, prefix))
    for first, second in product(drafts, drafts):
        better = max(first, second, key=lambda d: d.probability)
        yield replace(better, probability=first.probability * second.probability)


def mixed(drafter: TableDrafter, prefix: Path) -> Iterator[Draft]:
    """Left to right, every other token the likeliest one and flagged ``delta``, the rest drawn."""
    offset = len(prefix) % 2

    def step(tokens: Path, rows: tuple[Row, ...], chance: float) -> Iterator[Draft]:
        at = len(tokens)
        if at == drafter.block:
            yield Draft(chance, tokens, rows, delta=tuple((i + offset) % 2 == 0 for i in range(at)))
            return
        row = drafter.row(prefix, (*tokens, *[None] * (drafter.block - at)), at)
        law = softmax(row)
        if (at + offset) % 2 == 0:
            yield from step((*tokens, law.index(max(law))), (*rows, row), chance)
        else:
            for token, share in enumerate(law):
                yield from step((*tokens, token), (*rows, row), chance * share)

    yield from step((), (), 1.0)


def as_delta(procedure: Callable[[TableDrafter, Path], Iterator[Draft]]) -> dict[str, object]:
    """Keyword arguments of :class:`TableDrafter`: ``procedure`` with every token tested as Delta."""
    return {"procedure": procedure, "law": Delta()}


def _positions(choose: str, masked: list[int], laws: dict[int, Row]) -> Iterator[tuple[int, int, float]]:
    """(position, token, probability) of every outcome of one step."""
    if choose == "drawn":
        outcomes: dict[tuple[int, int], float] = defaultdict(float)
        for tokens, chance in _draws([laws[i] for i in masked]):
            best = max(range(len(masked)), key=lambda k: laws[masked[k]][tokens[k]])
            outcomes[masked[best], tokens[best]] += chance
        yield from ((position, token, chance) for (position, token), chance in outcomes.items() if chance > 0)
        return
    if choose == "left":
        position = masked[0]
    elif choose == "right":
        position = masked[-1]
    else:
        position = max(masked, key=lambda i: max(laws[i]))
    for token, share in enumerate(laws[position]):
        if share > 0:
            yield position, token, share


def _marginals(drafter: TableDrafter, prefix: Path, canvas: Sequence[int | None]) -> tuple[Row, ...]:
    return tuple(drafter.row(prefix, canvas, i) for i in range(drafter.block))


def _draws(laws: Sequence[Row]) -> Iterator[tuple[Path, float]]:
    """Every tuple of independent draws, with its probability."""
    for tokens in product(*(range(len(law)) for law in laws)):
        chance = 1.0
        for law, token in zip(laws, tokens, strict=True):
            chance *= law[token]
        yield tokens, chance


def _chance(draft: Draft, position: int, token: int) -> float:
    assert draft.logits is not None
    return softmax(draft.logits[position])[token]


def _cut(draft: Draft, length: int) -> Draft:
    assert draft.logits is not None
    return replace(draft, tokens=draft.tokens[:length], logits=draft.logits[:length])
