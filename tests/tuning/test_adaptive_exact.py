"""Lengths that follow earlier verdicts keep the law: every draw of whole runs of the engine is enumerated."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from specdiff.loop import Decoding, Job
from specdiff.stopping import StopTests
from specdiff.target import Pass
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.lengths import AdaptiveLengths, FixedLengths
from specdiff.verify import Proposal, Sampled, Verdict, decide
from specdiff.verify.audit import target_law, total_variation
from specdiff.verify.audit_models import TableLM
from specdiff.warp import BlockWarp

VOCAB, BLOCK, TOKENS = 2, 2, 4
EXACT, BIASED = 1e-6, 0.005


class Script:
    """Every random choice of a run, taken from a list; what lies beyond it is the first possible one, noted."""

    def __init__(self, choices):
        self.choices, self.at, self.weight = list(choices), 0, 1.0
        self.open = []

    def pick(self, law):
        if self.at == len(self.choices):
            first, *others = [value for value, chance in enumerate(law) if chance > 0]
            self.open += [[*self.choices, other] for other in others]
            self.choices.append(first)
        value = self.choices[self.at]
        self.at += 1
        self.weight *= float(law[value])
        return value


class TableTarget:
    name, device, dtype, vocab_size, max_positions, whole_prefill = (
        "table",
        torch.device("cpu"),
        None,
        VOCAB,
        None,
        False,
    )
    recorder = None

    def __init__(self, table):
        self.table = table

    def open(self, batch, capacity, taps, seen=None):
        return TableState(self.table)


class TableState:
    def __init__(self, table):
        self.table, self.ids = table, []

    @property
    def lengths(self):
        return [len(self.ids)]

    def forward(self, tokens, counts, head="all"):
        self.fresh = tokens[0].tolist()
        rows = [self.table.scores(tuple((self.ids + self.fresh[: i + 1])[1:])) for i in range(len(self.fresh))]
        return Pass(torch.tensor(rows if head == "all" else rows[-1:], dtype=torch.float64)[None], None)

    def advance(self, counts):
        self.ids += self.fresh[: counts[0]]

    def close(self): ...


class TableDrafter:
    """Draws from a table of its own. ``cut`` looks at the draws: the proposal ends before an unlikely one."""

    block_size, taps = BLOCK, ()

    def __init__(self, table, script, cut=False):
        self.table, self.script, self.cut, self.ids = table, script, cut, []

    def start(self, request):
        return self

    def propose(self, anchor, limits, noise):
        path, rows = [*self.ids, int(anchor)], []
        for _ in range(int(limits)):
            rows.append(self.table.scores(tuple(path[1:])))
            law = self.table.law(tuple(path[1:]))
            path.append(self.script.pick(law))
            if self.cut and law[path[-1]] < 0.4:
                path.pop()
                rows.pop()
                break
        tokens = torch.tensor([path[len(self.ids) + 1 :]], dtype=torch.long).view(1, len(rows))
        logits = torch.tensor(rows, dtype=torch.float64).view(1, len(rows), VOCAB)
        return Proposal(tokens, torch.tensor([len(rows)]), Sampled(), logits)

    def commit(self, tokens, counts, taps):
        self.ids += tokens[0, : int(counts)].tolist()

    def close(self): ...


class ByPastVerdicts(FixedLengths):
    """Longer after a round that kept something, shorter after one that kept nothing, sometimes none at all."""

    def __init__(self):
        self.now = 1

    def choose(self, caps, outlooks):
        return [min(cap, self.now) for cap in caps]

    def settle(self, proposed, accepted, emitted):
        self.now = {True: 2, False: (self.now - 1) % 3}[accepted[0] > 0]


CURVE = CostCurve(1, 1, "table", {1: 1.0, 2: 1.05, 3: 1.2}, {1: 0.05, 2: 0.1}, BLOCK, prefill=20.0)
LENGTHS = {"by past verdicts": ByPastVerdicts, "by costs": lambda: AdaptiveLengths(CURVE)}


def law_of_the_engine(monkeypatch, rule, make_lengths, seed, cut=False):
    """``float64[V, V, V, V]`` law of four new tokens, and the limits that were seen."""
    target, own = TableLM(VOCAB, seed), TableLM(VOCAB, seed + 100)
    law, seen, waiting = torch.zeros([VOCAB] * TOKENS, dtype=torch.float64), set(), [[]]
    while waiting:
        script = Script(waiting.pop())

        def verify(rule, scores, proposal, noise, script=script):
            decision = decide(rule, scores, proposal)
            chances = decision.thresholds[0].tolist()
            passed = [bool(script.pick([1 - chance, chance])) for chance in chances]
            kept = decision.accepted(torch.tensor([passed], dtype=torch.bool).view(1, len(chances)))
            weights = decision.weights(kept)[0].double()
            token = script.pick((weights / weights.sum()).tolist())
            return Verdict(kept, torch.tensor([token]), decision.bad(kept))

        monkeypatch.setattr("specdiff.loop.verify", verify)
        lengths = make_lengths()
        choose = lengths.choose
        lengths.choose = lambda caps, looks, choose=choose: seen.add(tuple(found := choose(caps, looks))) or found
        job = Job(
            ids=torch.zeros(1, 1, dtype=torch.long), pads=[0], max_new=TOKENS, pad_token=0, rule=rule,
            block_size=BLOCK, warp=BlockWarp(None), seeds=torch.zeros(1, dtype=torch.long), lengths=lengths,
            stops=StopTests(StoppingCriteriaList([MaxLengthCriteria(1 + TOKENS)])),
        )  # fmt: skip
        (row,) = Decoding(job, TableTarget(target), TableDrafter(own, script, cut)).run()
        law[tuple(row.new)] += script.weight
        waiting += script.open
    return law, target_law(target, TOKENS), seen


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_adaptive_lengths_keep_the_law(monkeypatch, rule, lengths):
    law, right, seen = law_of_the_engine(monkeypatch, rule, LENGTHS[lengths], seed=1)
    assert float(law.sum()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(law, right) < EXACT
    assert len(seen) > 1  # the lengths did vary


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_length_that_looks_at_the_draw_is_biased(monkeypatch, rule):
    law, right, _ = law_of_the_engine(monkeypatch, rule, ByPastVerdicts, seed=1, cut=True)
    assert float(law.sum()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(law, right) > BIASED
