"""Exact laws: every rule and law over two chained rounds, through the real decision code."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from specdiff.errors import InvalidInputError
from specdiff.verify import RULES, Coupled, Delta, Sampled, decide
from specdiff.verify.audit import (
    BIASED,
    EXACT,
    LOSSLESS,
    LOSSY,
    enumerate_law,
    pack,
    run_enumeration,
    target_law,
    total_variation,
)
from specdiff.verify.audit_coupling import coupling, representative
from specdiff.verify.audit_models import (
    TableDrafter,
    TableLM,
    in_order,
    one_step,
    ragged,
    softmax,
    temperature,
    top_k,
    top_p,
)

SIZES = [(v, k) for v in (2, 3, 4) for k in (1, 2, 3)]
RATIO = ("token", "block")


def bias(rule, drafter, target, horizon, **options):
    law = enumerate_law(rule, drafter, target, horizon, **options)
    assert math.isclose(law.sum().item(), 1.0, abs_tol=1e-12)
    return total_variation(law, target_law(target, horizon, greedy=rule == "greedy"))


@pytest.mark.parametrize(("vocab", "block"), SIZES)
@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("procedure", [one_step, ragged], ids=["full", "ragged"])
def test_sampled_is_exact(rule, procedure, vocab, block):
    target = TableLM(vocab, 10 * vocab + block, zeros=0.25)
    drafter = TableDrafter(TableLM(vocab, 77 + block, zeros=0.15), block, procedure)
    assert bias(rule, drafter, target, min(block + 2, 4)) < EXACT


@pytest.mark.parametrize("rule", RATIO)
def test_two_whole_rounds_are_exact(rule):
    """The horizon is as long as two rounds can get, so nothing of the second one is cut off."""
    target = TableLM(2, 3, zeros=0.2)
    drafter = TableDrafter(TableLM(2, 4), 3, one_step)
    assert bias(rule, drafter, target, 8) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_ways_to_draft_at_block_3(rule, name):
    procedure, law = LOSSLESS[name]
    target = TableLM(3 if name != "redrawn from the last pass" else 2, 21, zeros=0.2)
    drafter = TableDrafter(TableLM(target.vocab, 22), 3, procedure, law)
    assert bias(rule, drafter, target, 4) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("name", LOSSY)
def test_biased_ways_to_draft_show(rule, name):
    procedure, law = LOSSY[name]
    worst = 0.0
    for seed in range(3):
        drafter = TableDrafter(TableLM(3, 50 + seed), 2, procedure, law)
        worst = max(worst, bias(rule, drafter, TableLM(3, 40 + seed), 3))
    assert worst > 5 * BIASED


@pytest.mark.parametrize("block", [2, 3])
def test_noise_keyed_by_position_biases_the_block_rule(block):
    worst = 0.0
    for seed in range(3):
        target, drafter = TableLM(3, seed), TableDrafter(TableLM(3, 1000 + seed), block, one_step)
        worst = max(worst, bias("block", drafter, target, block + 2, position_keyed=True))
        assert bias("block", drafter, target, block + 2) < EXACT
        # one round alone cannot see it
        assert bias("block", drafter, target, block + 2, rounds=1, position_keyed=True) < EXACT
    assert worst > 4 * BIASED


def test_position_keyed_control_is_for_the_block_rule():
    with pytest.raises(InvalidInputError, match="block rule"):
        enumerate_law("token", TableDrafter(TableLM(2, 0), 1, one_step), TableLM(2, 1), 1, position_keyed=True)


@pytest.mark.parametrize("rule", RATIO)
def test_coupled_noise_in_a_ratio_test_is_biased(rule):
    target, drafter = TableLM(3, 5), TableDrafter(TableLM(3, 6), 2, one_step)
    assert bias(rule, drafter, target, 3, reuse_draft_noise=True) > 5 * BIASED


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize(
    ("ids", "vocab"),
    [((2, 0), 4), ((3, 1, 2), 4), ((0, 5, 2), 3), ((1, -1, 0), 3), ((1, 1, 0), 3)],
    ids=["two of four", "three of four", "id past the target", "negative id", "id twice"],
)
def test_pruned_vocabulary_is_exact(rule, ids, vocab):
    target = TableLM(vocab, 9, zeros=0.2)
    drafter = TableDrafter(TableLM(len(ids), 8), 2, one_step, draft_ids=ids)
    assert bias(rule, drafter, target, 4 if vocab == 3 else 3) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_b35_delta_tokens_outside_the_vocabulary(rule):
    """A looked-up id that the target does not have is rejected, and takes no other token's place in the residual."""
    drafter = TableDrafter(TableLM(3, 8), 2, one_step, Delta(), draft_ids=(0, 5, -2))
    assert bias(rule, drafter, TableLM(3, 9), 3) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("width", [2, 4])
def test_b35_drafter_narrower_or_wider_than_the_target(rule, width):
    """Without ``draft_ids`` column v is id v; ids that the target lacks are rejected, not cut away."""
    drafter = TableDrafter(TableLM(width, 30), 2, one_step)
    assert bias(rule, drafter, TableLM(3, 31), 4) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize(
    "warp",
    [temperature(0.3), temperature(2.0), top_k(2), top_p(0.6), lambda row: top_k(2)(temperature(0.5)(row))],
    ids=["t.3", "t2", "top-k", "top-p", "t.5+top-k"],
)
@pytest.mark.parametrize("both", [False, True], ids=["target", "both"])
def test_b09_warped_laws(rule, warp, both):
    """q is what was sampled from: the drafter may be warped as the target or not at all."""
    target = TableLM(4, 12, warp=warp)
    drafter = TableDrafter(TableLM(4, 13, warp=warp if both else tuple), 2, one_step)
    assert bias(rule, drafter, target, 3) < EXACT


@pytest.mark.parametrize("law", [Sampled(), Delta(), Coupled()], ids=repr)
@pytest.mark.parametrize(("vocab", "block"), [(2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 1)])
def test_coupled_rule_is_exact_for_any_law(law, vocab, block):
    target = TableLM(vocab, 14, zeros=0.2)
    drafter = TableDrafter(TableLM(vocab, 15, zeros=0.2), block, ragged, law)
    assert bias("coupled", drafter, target, block + 1) < EXACT


def test_coupled_rule_with_left_to_right_drafts_and_warped_target():
    target = TableLM(3, 16, warp=lambda row: top_k(2)(temperature(0.7)(row)))
    drafter = TableDrafter(TableLM(3, 17), 2, in_order("left"), Coupled())
    assert bias("coupled", drafter, target, 4) < EXACT


@pytest.mark.parametrize("law", [Sampled(), Delta(), Coupled()], ids=repr)
@pytest.mark.parametrize("procedure", [one_step, ragged], ids=["full", "ragged"])
def test_greedy_rule_gives_the_argmax_for_any_law(law, procedure):
    for seed in range(4):
        drafter = TableDrafter(TableLM(3, 90 + seed), 3, procedure, law)
        assert bias("greedy", drafter, TableLM(3, 80 + seed, zeros=0.2), 5) < EXACT


def test_block_keeps_at_least_as_many_as_token():
    """In expectation, for every context; strictly more somewhere. Sun et al. 2025, theorem 2."""
    gains = []
    for seed in range(12):
        target = TableLM(3, 200 + seed, zeros=0.1)
        drafter = TableDrafter(TableLM(3, 300 + seed), 3, one_step)
        drafts = drafter.drafts(())
        proposal, scores = pack([((), d) for d in drafts], drafter, target)
        chance = torch.tensor([d.probability for d in drafts], dtype=torch.float64)
        kept = {}
        for rule in RATIO:
            decision = decide(rule, scores, proposal)
            h = decision.thresholds
            kept[rule] = 0.0
            for pattern in product((True, False), repeat=3):
                passed = torch.tensor(pattern)
                share = torch.where(passed, h, 1 - h).prod(dim=1)
                kept[rule] += (chance * share * decision.accepted(passed.expand_as(h))).sum().item()
        gains.append(kept["block"] - kept["token"])
    assert min(gains) > -1e-12
    assert max(gains) > 1e-2


def test_coupling_has_the_right_marginals_and_regions():
    """The closed form against its marginals, and each representative against the two races."""
    for seed in range(6):
        q = TableLM(4, seed, zeros=0.3).law("q")
        p = TableLM(4, seed, zeros=0.3).law("p")
        joint = torch.tensor(coupling(q, p), dtype=torch.float64)
        torch.testing.assert_close(joint.sum(1), torch.tensor(q, dtype=torch.float64), atol=1e-14, rtol=0)
        torch.testing.assert_close(joint.sum(0), torch.tensor(p, dtype=torch.float64), atol=1e-14, rtol=0)
        for i, j in product(range(4), range(4)):
            if joint[i, j] > 0:
                noise = representative(q, p, i, j)
                assert all(x > 0 for x in noise)
                assert max(range(4), key=lambda v: q[v] / noise[v]) == i
                assert max(range(4), key=lambda v: p[v] / noise[v]) == j


def test_coupling_against_simulation():
    q, p = softmax((0.0, 1.0, -1.0)), softmax((1.0, 0.0, 0.3))
    noise = torch.empty(200_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    first = (torch.tensor(q) / noise).argmax(1)
    second = (torch.tensor(p) / noise).argmax(1)
    counts = torch.bincount(first * 3 + second, minlength=9).double() / 200_000
    torch.testing.assert_close(counts.reshape(3, 3), torch.tensor(coupling(q, p)).double(), atol=6e-3, rtol=0)


def test_the_audit_as_shipped():
    rows = run_enumeration(seeds=(0,))
    assert [row for row in rows if not row.ok] == []
    assert {row.rule for row in rows} == {"greedy", "token", "block", "coupled"}
    assert sum(row.biased for row in rows) >= 2 * (len(LOSSY) + 1) + 1
