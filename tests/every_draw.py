"""The exact law of what the engine writes: every draw of whole runs is enumerated, thousands of runs in one batch.

The engine, the rules and the drafters' sessions are the real ones. Only the noise is replaced: a row of the batch
carries a script of what each of its draws came out as, and the weight that this has. Runs that a row has seen the
beginning of are put off to the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from specdiff.drafters.base import Drafter, DraftRequest, as_limits
from specdiff.drafters.block_draws import RoundDraws
from specdiff.loop import Decoding, Job
from specdiff.stopping import StopTests
from specdiff.target import Pass
from specdiff.verify import Coupled, Delta, Proposal, Verdict, decide, verify
from specdiff.verify.audit_coupling import coupling, representative
from specdiff.verify.audit_models import Draft, TableLM, softmax
from specdiff.verify.audit_models import TableDrafter as Lister
from specdiff.verify.noise import Purpose
from specdiff.warp import BlockWarp

EXACT, BIASED = 1e-6, 0.002
BATCH = 8192


class Script:
    """Every draw of one row, taken from a list; what lies beyond it is the first possible one, noted."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices, self.at, self.weight = list(choices), 0, 1.0
        self.open: list[list[int]] = []
        self.new: list[int] = []

    def pick(self, law: Sequence[float]) -> int:
        first, *others = [value for value, chance in enumerate(law) if chance > 0]
        if not others:  # no choice, so no line of the script: whether one is asked may depend on the batch
            self.weight *= law[first]
            return first
        if self.at == len(self.choices):
            self.open += [[*self.choices, other] for other in others]
            self.choices.append(first)
        value = self.choices[self.at]
        self.at += 1
        self.weight *= law[value]
        return value


class ScriptedNoise:
    """In place of ``specdiff.verify.Noise``; the row seeds are numbers of scripts."""

    scripts: Sequence[Script] = ()

    def __init__(self, seeds: Tensor) -> None:
        self.mine = [self.scripts[i] for i in seeds.tolist()]

    def select(self, rows: Tensor) -> ScriptedNoise:
        out = ScriptedNoise(torch.zeros(0, dtype=torch.long))
        out.mine = [self.mine[i] for i in rows.tolist()]
        return out

    def round(self, lengths: Tensor) -> ScriptedRound:
        return ScriptedRound(self.mine)


class ScriptedRound:
    """A round's noise. A drafter that draws by a race of exponentials is handed ``forced`` winners."""

    def __init__(self, scripts: list[Script]) -> None:
        self.scripts = scripts
        self.forced = torch.zeros(len(scripts), 0, dtype=torch.long)

    def uniform(self, purpose: Purpose, slots: int) -> Tensor:
        raise AssertionError("rules are enumerated, so nothing may draw for them")

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        raise AssertionError("coupled noise is given as numbers")

    def exponential(self, purpose: Purpose, slots: int, ids: Tensor) -> Tensor:
        assert purpose == Purpose.DRAFT
        winners = self.forced[:, :slots, None]
        return torch.full((len(winners), slots, len(ids)), 1e30).scatter_(2, winners, 1e-30)


class TableTarget:
    """A :class:`TableLM` after a prompt that it does not look at."""

    name, device, dtype = "table", torch.device("cpu"), torch.float32
    max_positions, whole_prefill, recorder = None, False, None

    def __init__(self, table: TableLM, prompt: int) -> None:
        self.table, self.prompt, self.vocab_size = table, prompt, table.vocab

    def open(self, batch: int, capacity: int, taps: Sequence[int], seen: Any = None) -> TableState:
        return TableState(self.table, self.prompt, batch)


class TableState:
    def __init__(self, table: TableLM, prompt: int, batch: int) -> None:
        self.table, self.prompt = table, prompt
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.fresh: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.ids]

    def forward(self, tokens: Tensor, counts: Tensor, head: str | None = "all") -> Pass:
        nothing = (float("nan"),) * self.table.vocab
        self.fresh = tokens.tolist()
        rows = []
        for ids, fresh, count in zip(self.ids, self.fresh, counts.tolist(), strict=True):
            wanted = range(count) if head == "all" else [count - 1]
            seen = [*ids, *fresh]
            rows.append([self.table.scores(tuple(seen[self.prompt : len(ids) + i + 1])) for i in wanted])
            rows[-1] += [nothing] * ((tokens.shape[1] if head == "all" else 1) - len(rows[-1]))
        return Pass(torch.tensor(rows, dtype=torch.float64), None)

    def advance(self, counts: Sequence[int]) -> None:
        for ids, fresh, count in zip(self.ids, self.fresh, counts, strict=True):
            ids += fresh[:count]

    def select(self, rows: Sequence[int]) -> None:
        self.ids = [self.ids[i] for i in rows]

    def close(self) -> None: ...


class ListedDrafter:
    """Draws from what a drafter of :mod:`specdiff.verify.audit_models` lists: whole blocks, cut at the row's limit.

    Args:
        lister: lists every proposal after the committed tokens.
        change: what becomes of a proposal (for controls).
    """

    taps = ()

    def __init__(self, lister: Lister, change: Callable[[Proposal], Proposal] = lambda p: p) -> None:
        self.lister, self.change, self.block_size = lister, change, lister.block
        self._known: dict[tuple[tuple[int, ...], int], list[Draft]] = {}

    def start(self, request: DraftRequest) -> ListedSession:
        return ListedSession(self, request)

    def drafts(self, prefix: tuple[int, ...], limit: int) -> list[Draft]:
        """Proposals cut to ``limit`` tokens; those that are the same then are one."""
        if (prefix, limit) not in self._known:
            merged: dict[Draft, float] = {}
            for draft in self.lister.drafts(prefix):
                cut = replace(draft, probability=1.0, **{
                    name: None if value is None or (name == "logits" and self.lister.law == Delta()) else value[:limit]
                    for name in ("tokens", "logits", "written", "delta")
                    for value in [getattr(draft, name)]
                })  # fmt: skip
                merged[cut] = merged.get(cut, 0.0) + draft.probability
            self._known[prefix, limit] = [replace(d, probability=chance) for d, chance in merged.items()]
        return self._known[prefix, limit]


class ListedSession:
    def __init__(self, drafter: ListedDrafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self.ids: list[list[int]] = [[] for _ in range(request.batch_size)]

    def propose(self, anchor: Tensor, limits: Tensor, noise: ScriptedRound) -> Proposal:
        block, vocab = self.drafter.block_size, self.request.vocab_size
        drafts = []
        for ids, last, limit, script in zip(
            self.ids, anchor.tolist(), as_limits(limits, block).tolist(), noise.scripts, strict=True
        ):
            options = self.drafter.drafts((*ids, last), limit) if limit else [Draft(1.0, (), ())]
            drafts.append(options[script.pick([d.probability for d in options])])

        def table(name: str, filler: Any) -> list[list[Any]]:
            return [[*(getattr(d, name) or ()), *[filler] * (block - len(getattr(d, name) or ()))] for d in drafts]

        law = self.drafter.lister.law
        written, delta = (any(getattr(d, name) is not None for d in drafts) for name in ("written", "delta"))
        return self.drafter.change(
            Proposal(
                tokens=torch.tensor(table("tokens", 0)),
                lengths=torch.tensor([len(d.tokens) for d in drafts]),
                law=law,
                logits=None if law == Delta() else torch.tensor(table("logits", (0.0,) * vocab)).double(),
                written=torch.tensor(table("written", 0)) if written else None,
                delta=torch.tensor(table("delta", False)) if delta else None,
            )
        )

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        for ids, fresh, count in zip(self.ids, tokens.tolist(), counts.tolist(), strict=True):
            ids += fresh[:count]

    def select(self, rows: Tensor) -> None:
        self.ids = [self.ids[i] for i in rows.tolist()]

    def rollback(self, lengths: Tensor) -> None:
        raise AssertionError("one call edits no history")

    def close(self) -> None: ...


class ForcedDrafter:
    """A real drafter that draws with :class:`RoundDraws`, with every token of its block forced in turn.

    A row's weight takes the probabilities that the forced tokens had when they were drawn for the last time: right
    where positions are chosen without looking at what was drawn. Tokens of an intermediate canvas, which a last pass
    draws anew, take those of the first time: right for two passes. Under law Delta it does not matter: all weigh the
    same.

    Args:
        inner: the drafter.
        canvas: whether it has an intermediate canvas.
        change: what becomes of a proposal (for controls).
    """

    def __init__(
        self, inner: Drafter, canvas: bool = False, change: Callable[[Proposal], Proposal] = lambda p: p
    ) -> None:
        self.inner, self.change, self.halves = inner, change, 1 + canvas
        self.block_size, self.taps = inner.block_size, inner.taps

    def start(self, request: DraftRequest) -> ForcedSession:
        return ForcedSession(self, request)


class ForcedSession:
    def __init__(self, owner: ForcedDrafter, request: DraftRequest) -> None:
        self.owner, self.request = owner, request
        self.inner = owner.inner.start(request)
        self.commit, self.select, self.rollback = self.inner.commit, self.inner.select, self.inner.rollback
        self.close = self.inner.close

    def propose(self, anchor: Tensor, limits: Tensor, noise: ScriptedRound) -> Proposal:
        block, vocab = self.owner.block_size, self.request.vocab_size
        drafting = [limit > 0 for limit in limits.tolist()]
        noise.forced = torch.tensor(
            [
                [script.pick([1.0] * vocab) if draws else 0 for _ in range(block * self.owner.halves)]
                for script, draws in zip(noise.scripts, drafting, strict=True)
            ]
        )
        laws = torch.full((*noise.forced.shape, vocab), 1 / vocab, dtype=torch.float64)
        drawn = torch.zeros(noise.forced.shape, dtype=torch.bool)
        honest = RoundDraws.categorical

        def noting(draws: RoundDraws, logits: Tensor, positions: Tensor) -> Tensor:
            slot = positions - draws.origin[draws.rows][:, None]
            here, slot = (slot >= 0) & (slot < block), slot.clamp(0, block - 1) + draws.half * block
            here &= ~(drawn[draws.rows[:, None], slot] & bool(draws.half))
            row, column = here.nonzero(as_tuple=True)
            at = draws.rows[row], slot[row, column]
            laws[at], drawn[at] = torch.softmax(logits.double(), -1)[row, column], True
            return honest(draws, logits, positions)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RoundDraws, "categorical", noting)
            proposal = self.inner.propose(anchor, limits, noise)
        if proposal.law == Delta():
            laws = torch.full_like(laws, 1 / vocab)
        chances = laws.gather(2, noise.forced[..., None])[..., 0].prod(1).tolist()
        for script, draws, chance in zip(noise.scripts, drafting, chances, strict=True):
            script.weight *= chance if draws else 1.0
        return self.owner.change(proposal)


class FixedRound(ScriptedRound):
    """Coupled noise given as numbers."""

    def __init__(self, values: Tensor) -> None:
        super().__init__([])
        self.values = values

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        return self.values


def _coupled(scores: Tensor, proposal: Proposal, scripts: Sequence[Script]) -> Verdict:
    """The target's own token of each slot, given the drafted one that shares its noise."""
    noise = torch.ones_like(scores)
    for b, (script, length) in enumerate(zip(scripts, proposal.lengths.tolist(), strict=True)):
        for slot in range(length + 1):
            p = softmax(tuple(scores[b, slot].tolist()))
            if slot == length or proposal.law != Coupled():
                token = script.pick(p)
                noise[b, slot] = torch.tensor(representative(p, p, token, token))
            else:
                assert proposal.logits is not None
                q, drafted = softmax(tuple(proposal.logits[b, slot].tolist())), int(proposal.tokens[b, slot])
                token = script.pick([x / q[drafted] for x in coupling(q, p)[drafted]])
                noise[b, slot] = torch.tensor(representative(q, p, drafted, token))
            if slot < length and token != int(proposal.tokens[b, slot]):
                break
    return verify("coupled", scores, proposal, FixedRound(noise))


def law_of_texts(
    target: TableLM, drafter: Any, rule: str, new: int, prompt: Sequence[int] = (0,), block: int | None = None
) -> tuple[Tensor, int]:
    """``float64[V] * new``: law of the engine's new tokens; and the most rounds with a draft that a text took."""
    law = torch.zeros([target.vocab] * new, dtype=torch.float64)
    rounds = 0

    def judge(rule: str, scores: Tensor, proposal: Proposal, noise: ScriptedRound) -> Verdict:
        if rule == "coupled":
            verdict = _coupled(scores, proposal, noise.scripts)
            for script, kept, token, drafts in zip(
                noise.scripts, verdict.accepted.tolist(), verdict.next_token.tolist(), proposal.tokens.tolist(),
                strict=True,
            ):  # fmt: skip
                script.new += [*drafts[:kept], token]
                if len(script.new) == new:
                    law[tuple(script.new)] += script.weight
            return verdict
        decision = decide(rule, scores, proposal)
        thresholds = decision.thresholds.double()
        rows, width = thresholds.shape
        share = torch.zeros(rows, width + 1, dtype=torch.float64)
        for pattern in product((True, False), repeat=width):
            passed = torch.tensor(pattern, dtype=torch.bool).expand(rows, width)
            chance = torch.where(passed, thresholds, 1 - thresholds).prod(1, keepdim=True)
            share.scatter_add_(1, decision.accepted(passed)[:, None], chance)
        count = torch.tensor([s.pick(row) for s, row in zip(noise.scripts, share.tolist(), strict=True)])
        weights = decision.weights(count).double()
        chosen = []
        for script, kept, drafts, following in zip(
            noise.scripts, count.tolist(), proposal.tokens.tolist(), (weights / weights.sum(1, keepdim=True)).tolist(),
            strict=True,
        ):  # fmt: skip
            script.new += drafts[:kept]
            if len(script.new) + 1 < new:
                chosen.append(script.pick(following))
            else:  # the last token: all of its draws at once
                law[tuple(script.new)] += script.weight * torch.tensor(following, dtype=torch.float64)
                chosen.append(max(range(len(following)), key=lambda v: following[v]))
            script.new.append(chosen[-1])
        return Verdict(count, torch.tensor(chosen), decision.bad(count))

    waiting: list[list[int]] = [[]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdiff.loop.verify", judge)
        patch.setattr("specdiff.loop.Noise", ScriptedNoise)
        while waiting:
            scripts = [Script(choices) for choices in waiting[-BATCH:]]
            del waiting[-BATCH:]
            ScriptedNoise.scripts = scripts
            ids = torch.tensor([list(prompt)]).repeat(len(scripts), 1)
            job = Job(
                ids=ids, pads=[0] * len(ids), max_new=new, pad_token=0, rule=rule,
                block_size=block or drafter.block_size, warp=BlockWarp(None), seeds=torch.arange(len(ids)),
                stops=StopTests(StoppingCriteriaList([MaxLengthCriteria(len(prompt) + new)])),
            )  # fmt: skip
            for row, script in zip(
                Decoding(job, TableTarget(target, len(prompt)), drafter).run(), scripts, strict=True
            ):
                assert row.new == script.new and script.at == len(script.choices)
                waiting += script.open
            rounds = max(rounds, *job.stats.row_rounds)
    return law, rounds
