"""Exact enumeration: the law of the text that a rule and a drafter produce, against the target's own.

Every proposal of a tabular drafter is listed with its probability and decided by the real rules (:func:`decide`); the
law of the first tokens after several chained rounds must be the target's to rounding. Biased ways to draft must show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from specdiff.errors import InvalidInputError
from specdiff.verify.audit_coupling import coupling, representative
from specdiff.verify.audit_models import (
    Draft,
    Path,
    Row,
    TableDrafter,
    TableLM,
    argmax_path,
    best_of_two,
    in_order,
    mixed,
    one_step,
    ragged,
    redrawn_all,
    redrawn_left,
    softmax,
    temperature,
    top_k,
    top_p,
    truncated_before,
)
from specdiff.verify.laws import Coupled, Delta, Law, Proposal, Sampled
from specdiff.verify.noise import Purpose
from specdiff.verify.rules import decide, verify

EXACT = 1e-12
"""Largest total variation that counts as none."""
BIASED = 1e-3
"""Smallest total variation that counts as a bias."""

State = tuple[Path, tuple[float, ...]]
"""Tokens so far; and, for noise that is wrongly keyed by position, what is known about the next uniforms."""


def target_law(target: TableLM, horizon: int, greedy: bool = False) -> Tensor:
    """``float64[V] * horizon``: joint law of the first ``horizon`` tokens of plain decoding."""
    return _dense(_extend(target, {(): 1.0}, horizon, greedy), target.vocab, horizon)


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the L1 distance of two laws of equal shape."""
    return float((first - second).abs().sum() / 2)


def enumerate_law(
    rule: str,
    drafter: TableDrafter,
    target: TableLM,
    horizon: int,
    rounds: int = 2,
    position_keyed: bool = False,
    reuse_draft_noise: bool = False,
) -> Tensor:
    """Joint law of the first ``horizon`` tokens of speculative decoding.

    After ``rounds`` rounds a text that is still shorter goes on by plain decoding.

    Args:
        rule: one of :data:`specdiff.verify.RULES`.
        drafter: lists its proposals. With rule "coupled" a ``Coupled`` drafter shares its noise with the target.
        target: the law to be kept.
        horizon: number of tokens.
        rounds: chained rounds of drafting and verification.
        position_keyed: negative control for the block rule: acceptance uniforms keyed by position alone, so that those
            of a rejected block come back in the next round.
        reuse_draft_noise: negative control: tokens drawn with the coupled noise, tested by a ratio rule, and replaced
            by a draw with that same noise.

    Returns:
        ``float64[V] * horizon``.
    """
    if position_keyed and rule != "block":
        raise InvalidInputError("position_keyed is a control of the block rule")
    states: dict[State, float] = {((), ()): 1.0}
    for _ in range(rounds):
        following: dict[State, float] = defaultdict(float)
        open_states = {}
        for state, chance in states.items():
            if len(state[0]) >= horizon:
                following[state] += chance
            else:
                open_states[state] = chance
        outcomes = (
            _coupled_round(drafter, target, open_states)
            if rule == "coupled"
            else _round(rule, drafter, target, open_states, position_keyed, reuse_draft_noise)
        )
        for path, floors, chance in outcomes:
            following[(path[:horizon], floors if len(path) < horizon else ())] += chance
        states = following
    merged: dict[Path, float] = defaultdict(float)
    for (path, _), chance in states.items():
        merged[path] += chance
    return _dense(_extend(target, merged, horizon, rule == "greedy"), target.vocab, horizon)


def pack(drafts: list[tuple[Path, Draft]], drafter: TableDrafter, target: TableLM) -> tuple[Proposal, Tensor]:
    """A batch of (committed tokens, proposal) as ``Proposal`` and float64 scores ``[B, K+1, V]``.

    What lies past a row's length is NaN or -1, to show that no rule looks at it.
    """
    nan = float("nan")
    block, width = drafter.block, drafter.table.vocab
    tokens, logits, written, delta, scores = [], [], [], [], []
    for path, draft in drafts:
        missing = block - len(draft.tokens)
        tokens.append([*draft.tokens, *[-1] * missing])
        scores.append([target.scores(path + draft.tokens[:i]) for i in range(len(draft.tokens) + 1)])
        scores[-1] += [(nan,) * target.vocab] * missing
        logits.append([*(draft.logits or ()), *[(nan,) * width] * missing])
        written.append([*(draft.written or ()), *[0] * missing])
        delta.append([*(draft.delta or ()), *[False] * missing])
    first = drafts[0][1]
    proposal = Proposal(
        tokens=torch.tensor(tokens, dtype=torch.long).reshape(len(drafts), block),
        lengths=torch.tensor([len(d.tokens) for _, d in drafts]),
        law=drafter.law,
        logits=None if drafter.law == Delta() else torch.tensor(logits, dtype=torch.float64),
        draft_ids=None if drafter.draft_ids is None or drafter.law == Delta() else torch.tensor(drafter.draft_ids),
        written=None if first.written is None else torch.tensor(written),
        delta=None if first.delta is None else torch.tensor(delta),
    )
    return proposal, torch.tensor(scores, dtype=torch.float64)


Outcome = tuple[Path, tuple[float, ...], float]


def _round(
    rule: str,
    drafter: TableDrafter,
    target: TableLM,
    states: dict[State, float],
    position_keyed: bool,
    reuse: bool,
) -> Iterator[Outcome]:
    """One round of a rule whose tests are ``u_i < h_i`` with independent uniforms."""
    rows = [(state, chance, draft) for state, chance in states.items() for draft in drafter.drafts(state[0])]
    if not rows:
        return
    proposal, scores = pack([(path, draft) for (path, _), _, draft in rows], drafter, target)
    decision = decide(rule, scores, proposal)
    thresholds = decision.thresholds.double()
    block = drafter.block
    known_floors = [[*known, *[0.0] * (block - len(known))] for (_, known), _, _ in rows]
    floors = torch.tensor(known_floors, dtype=torch.float64).reshape(len(rows), block)
    chances = ((thresholds - floors) / (1 - floors)).clamp(0, 1)

    share = torch.zeros(len(rows), block + 1, dtype=torch.float64)
    for pattern in product((True, False), repeat=block):
        wanted = torch.tensor(pattern, dtype=torch.bool)
        uniform = torch.where(wanted, thresholds / 2, thresholds)
        kept = decision.accepted(uniform < thresholds)
        share.scatter_add_(1, kept[:, None], torch.where(wanted, chances, 1 - chances).prod(dim=1, keepdim=True))
    shares = share.tolist()
    laws = []
    for count in range(block + 1):
        weights = decision.weights(torch.clamp(decision.lengths, max=count)).double()
        laws.append((weights / weights.sum(dim=1, keepdim=True)).tolist())
    tests = thresholds.tolist()

    for n, ((path, _), chance, draft) in enumerate(rows):
        for count in range(block + 1):
            mass = chance * draft.probability * shares[n][count]
            if mass == 0:
                continue
            law = laws[count][n]
            if reuse and count < len(draft.tokens):
                law = _reused(draft, count, law)
            after: tuple[float, ...] = ()
            if position_keyed:
                before = known_floors[n]
                after = tuple(max(before[m], tests[n][m]) for m in range(count + 1, len(draft.tokens)))
            for token, weight in enumerate(law):
                if weight > 0:
                    yield (*path, *draft.tokens[:count], token), after, mass * weight


def _reused(draft: Draft, slot: int, law: list[float]) -> list[float]:
    """Law of a draw from ``law`` with the noise that made the drafted token of ``slot`` win."""
    assert draft.logits is not None
    q, token = softmax(draft.logits[slot]), draft.tokens[slot]
    return [x / q[token] for x in coupling(q, law)[token]]


class _FixedNoise:
    """Coupled noise given as numbers. ``values``: ``float64[B, K+1, V]``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def uniform(self, purpose: Purpose, slots: int) -> Tensor:
        raise NotImplementedError

    def exponential(self, purpose: Purpose, slots: int, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        return self.values


def _coupled_round(drafter: TableDrafter, target: TableLM, states: dict[State, float]) -> Iterator[Outcome]:
    """One round of the coupled rule.

    Noise is listed by what it decides: per slot the target's token, given the drafted one. Noise of slots after the
    verdict's own does not influence it, so the next round may take that noise as fresh although its key is the same.
    """
    rows, noise = [], []
    for (path, _), chance in states.items():
        for draft in drafter.drafts(path):
            options = [
                _cells(drafter.law, draft, i, target.law(path + draft.tokens[:i])) for i in range(drafter.block + 1)
            ]
            for cells in product(*options):
                mass = chance * draft.probability
                for share, _ in cells:
                    mass *= share
                rows.append((path, draft, mass))
                noise.append([values for _, values in cells])
    if not rows:
        return
    proposal, scores = pack([(path, draft) for path, draft, _ in rows], drafter, target)
    verdict = verify("coupled", scores, proposal, _FixedNoise(torch.tensor(noise, dtype=torch.float64)))
    for (path, draft, mass), kept, token in zip(
        rows, verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True
    ):
        yield (*path, *draft.tokens[:kept], token), (), mass


def _cells(law: Law, draft: Draft, slot: int, p: Row) -> list[tuple[float, list[float]]]:
    """(probability, noise) of each target token at a slot, given the drafted token there."""
    if slot > len(draft.tokens):
        return [(1.0, [1.0] * len(p))]
    if law == Coupled() and slot < len(draft.tokens):
        assert draft.logits is not None
        q, i = softmax(draft.logits[slot]), draft.tokens[slot]
        joint = coupling(q, p)[i]
        return [(x / q[i], representative(q, p, i, j)) for j, x in enumerate(joint) if x > 0]
    return [(x, representative(p, p, j, j)) for j, x in enumerate(p) if x > 0]


def _extend(target: TableLM, paths: dict[Path, float], horizon: int, greedy: bool) -> dict[Path, float]:
    """Let every path go on by plain decoding up to ``horizon`` tokens."""
    while any(len(path) < horizon for path in paths):
        longer: dict[Path, float] = defaultdict(float)
        for path, chance in paths.items():
            if len(path) >= horizon:
                longer[path] += chance
            elif greedy:
                scores = target.scores(path)
                longer[(*path, scores.index(max(scores)))] += chance
            else:
                for token, share in enumerate(target.law(path)):
                    if share > 0:
                        longer[(*path, token)] += chance * share
        paths = longer
    return paths


def _dense(paths: dict[Path, float], vocab: int, horizon: int) -> Tensor:
    law = torch.zeros([vocab] * horizon, dtype=torch.float64)
    for path, chance in paths.items():
        law[path] += chance
    return law


@dataclass(frozen=True)
class AuditRow:
    """One line of the audit: ``ok`` means exact where it should be, biased where it must be."""

    name: str
    rule: str
    biased: bool
    total_variation: float
    ok: bool


Procedure = Callable[[TableDrafter, Path], Iterator[Draft]]

LOSSLESS: dict[str, tuple[Procedure, Law]] = {
    "one pass, marginals": (one_step, Sampled()),
    "ragged lengths, cut after a token": (ragged, Sampled()),
    "left to right": (in_order("left"), Sampled()),
    "right to left, exposed tokens as Delta": (in_order("right", declare=True), Sampled()),
    "confidence order, exposed tokens as Delta": (in_order("confident", declare=True), Sampled()),
    "chosen by drawn token, all as Delta": (in_order("drawn"), Delta()),
    "redrawn from the last pass": (redrawn_all, Sampled()),
    "argmax as Delta": (argmax_path, Delta()),
    "best of two as Delta": (best_of_two, Delta()),
    "drawn and argmax tokens mixed": (mixed, Sampled()),
}
"""Ways to draft that keep the target's law, by name."""

LOSSY: dict[str, tuple[Procedure, Law]] = {
    "right to left, naive": (in_order("right"), Sampled()),
    "confidence order, naive": (in_order("confident"), Sampled()),
    "chosen by drawn token, naive": (in_order("drawn"), Sampled()),
    "a left token redrawn later": (redrawn_left, Sampled()),
    "argmax with softmax q": (argmax_path, Sampled()),
    "best of two with q unchanged": (best_of_two, Sampled()),
    "cut before an unlikely token": (truncated_before, Sampled()),
}
"""Ways to draft that do not: negative controls."""

WARPS: dict[str, Callable[[Row], Row]] = {
    "temperature .5": temperature(0.5),
    "top-k 2": top_k(2),
    "top-p .7": top_p(0.7),
}


def run_enumeration(vocab: int = 3, block: int = 2, seeds: tuple[int, ...] = (0, 1)) -> list[AuditRow]:
    """Enumerate every rule and law over two chained rounds, and the negative controls. A few seconds.

    Args:
        vocab: ids of the tabular models.
        block: tokens per proposal.
        seeds: tables to try; a row reports the largest total variation of them.
    """
    horizon = block + 2
    rows: list[AuditRow] = []
    targets: dict[object, TableLM] = {}
    denoisers = {seed: TableLM(vocab, seed + 1000) for seed in seeds}

    def add(name: str, rule: str, biased: bool, one: Callable[[int], float]) -> None:
        worst = max(one(seed) for seed in seeds)
        rows.append(AuditRow(name, rule, biased, worst, worst > BIASED if biased else worst < EXACT))

    def distance(
        rule: str,
        procedure: Procedure,
        law: Law,
        warp: Callable[[Row], Row] = tuple,
        zeros: float = 0.2,
        position_keyed: bool = False,
        reuse_draft_noise: bool = False,
    ) -> Callable[[int], float]:
        def one(seed: int) -> float:
            target = targets.setdefault((seed, warp, zeros), TableLM(vocab, seed, zeros=zeros, warp=warp))
            drafter = TableDrafter(denoisers[seed], block, procedure, law)
            law_of_text = enumerate_law(
                rule, drafter, target, horizon, position_keyed=position_keyed, reuse_draft_noise=reuse_draft_noise
            )
            return total_variation(law_of_text, target_law(target, horizon, greedy=rule == "greedy"))

        return one

    for rule in ("token", "block"):
        for name, (procedure, law) in LOSSLESS.items():
            add(name, rule, False, distance(rule, procedure, law))
        for name, warp in WARPS.items():
            add(f"one pass, target with {name}", rule, False, distance(rule, one_step, Sampled(), warp, zeros=0.0))
        for name, (procedure, law) in LOSSY.items():
            add(name, rule, True, distance(rule, procedure, law, zeros=0.0))
        reused = distance(rule, one_step, Sampled(), zeros=0.0, reuse_draft_noise=True)
        add("coupled noise in a ratio test", rule, True, reused)
    keyed = distance("block", one_step, Sampled(), zeros=0.0, position_keyed=True)
    add("acceptance noise keyed by position", "block", True, keyed)
    for name in ("one pass, marginals", "ragged lengths, cut after a token", "argmax as Delta"):
        procedure, law = LOSSLESS[name]
        add(name, "greedy", False, distance("greedy", procedure, law))
        add(name, "coupled", False, distance("coupled", procedure, law))
    for name in ("one pass", "left to right"):
        procedure = one_step if name == "one pass" else in_order("left")
        add(f"{name}, coupled draws", "coupled", False, distance("coupled", procedure, Coupled()))
    return rows
