"""From runs to numbers to words: pure functions."""

from __future__ import annotations

import pytest
import torch

from specdiff.bench.arms import HF, HF_LOOKUP, PLAIN, SPECDIFF, Run
from specdiff.bench.loops import is_loop, repeated_share
from specdiff.bench.measure import Sample, batches
from specdiff.bench.prompts import Prompt
from specdiff.bench.summary import drafting, mode_numbers, quartiles
from specdiff.bench.verdict import by_block, expected_tau, verdict
from specdiff.stats import GenerationStats
from specdiff.tuning.curve import CostCurve, interpolate

PLAIN_TEXT = list(range(101))
LOOP = [1, 2, 3, 4] * 25 + [1]


def stats_of(emitted: list[list[int]], proposed: int) -> GenerationStats:
    stats = GenerationStats(
        row_rounds=[0] * len(emitted), emitted=[[1] for _ in emitted], seconds={"draft": 1, "verify": 2, "rest": 0.5}
    )
    for row, counts in enumerate(emitted):
        for count in counts:
            stats.rounds += 1
            stats.count(row, proposed, count - 1, count)
    return stats


def sample(name: str, set_name: str, text: list[int], speeds: dict[str, float]) -> Sample:
    """100 decoded tokens per arm at the given speeds; specdiff keeps 3 of 4 drafts in each of 25 rounds."""
    runs = {}
    for arm, speed in speeds.items():
        stats = stats_of([[4] * 25], 4) if arm == SPECDIFF else None
        passes = 25 if arm == SPECDIFF else 100
        runs[arm] = Run([text], prefill=0.5, decode=100 / speed, first=1, passes=passes, stats=stats)
    return Sample([Prompt(name, set_name, "x")], [torch.arange(5)], runs)


SAMPLES = [
    sample("a", "s", PLAIN_TEXT, {HF: 10, HF_LOOKUP: 12, PLAIN: 20, SPECDIFF: 60}),
    sample("b", "s", LOOP, {HF: 10, HF_LOOKUP: 30, PLAIN: 20, SPECDIFF: 80}),
    sample("c", "t", PLAIN_TEXT, {HF: 10, HF_LOOKUP: 9, PLAIN: 25, SPECDIFF: 50}),
]
COST = CostCurve(192, 1, "general", {1: 0.010, 4: 0.013, 5: 0.014, 8: 0.020}, {1: 0.001, 4: 0.002}, 4)


def test_run_counts_decoding_apart():
    run = Run([[1, 2, 3], [4]], prefill=1.0, decode=0.5, first=2, passes=2)
    assert (run.new_tokens, run.decoded, run.speed, run.tau) == (4, 2, 4.0, 1.0)
    only = Run([[1]], prefill=1.0, decode=0.0, first=1, passes=0)
    assert only.speed is None and only.tau is None


def test_ratios_and_tau():
    mode = mode_numbers(SAMPLES, 0.0)
    assert mode["ratios"]["speculation"]["median"] == pytest.approx(3)
    assert mode["ratios"]["kernels"]["median"] == pytest.approx(2)
    assert mode["ratios"]["whole"]["median"] == pytest.approx(6)
    assert mode["ratios"]["lookup"]["median"] == pytest.approx(1.2)
    assert mode["ratios_without_loops"]["speculation"] == {
        "label": mode["ratios"]["speculation"]["label"],
        **quartiles([3.0, 2.0]),
    }
    assert list(mode["ratios"]) == ["speculation", "kernels", "whole", "lookup"], "speculation comes first"
    tau = mode["tau"]
    assert tau["by_set"]["s"]["loops"] == 1 and tau["by_set"]["t"]["loops"] == 0
    assert tau["macro"] == pytest.approx(4)
    assert mode["arms"][SPECDIFF]["tau"] == pytest.approx(4)
    assert mode["batches_without_loops"] == 2


def test_macro_mean_weighs_sets_alike():
    more = SAMPLES[:2] * 3 + [sample("z", "t", PLAIN_TEXT, {HF: 10, HF_LOOKUP: 12, PLAIN: 20, SPECDIFF: 20})]
    more[-1].runs[SPECDIFF].passes = 100
    tau = mode_numbers(more, 0.0)["tau"]
    assert tau["macro"] == pytest.approx((4 + 1) / 2)


def test_drafting_numbers():
    found = drafting([SAMPLES[0]])
    assert found["acceptance_by_position"] == [1.0, 1.0, 1.0, 0.0]
    assert found["accepted_lengths"] == {"0": 0, "1": 0, "2": 0, "3": 25}
    assert found["acceptance_rate"] == 0.75
    assert found["seconds_per_round"]["verify"] == pytest.approx(2 / 25)


def test_b46_nothing_drafted_is_null_not_nan():
    silent = sample("a", "s", PLAIN_TEXT, {PLAIN: 10, SPECDIFF: 10})
    silent.runs[SPECDIFF].stats = stats_of([[1] * 100], 0)
    found = drafting([silent])
    assert found["acceptance_rate"] is None and found["acceptance_by_position"] == []
    empty = sample("a", "s", [1], {PLAIN: 10, SPECDIFF: 10})
    for run in empty.runs.values():
        run.passes = 0
        run.stats = stats_of([[]], 0) if run.stats else None
    mode = mode_numbers([empty], 0.0)
    assert mode["arms"][SPECDIFF]["tau"] is None and mode["ratios"]["speculation"]["median"] is None
    assert verdict(COST, mode)["use"] is None


def test_loops():
    assert repeated_share(PLAIN_TEXT) == 0 and not is_loop(PLAIN_TEXT)
    assert repeated_share(LOOP) == pytest.approx(1 - 4 / 96) and is_loop(LOOP)
    assert repeated_share([1, 1, 1]) == 0
    once_more = [*range(60), *range(30)]  # a third of the text repeats the first half
    assert is_loop(once_more) and not is_loop([*range(80), *range(20)])


def test_quartiles():
    assert quartiles([]) == {"median": None, "p25": None, "p75": None, "count": 0}
    assert quartiles([None, 2.0]) == {"median": 2.0, "p25": 2.0, "p75": 2.0, "count": 1}
    assert quartiles([1.0, 2.0, 3.0])["median"] == 2.0


def test_batches_keep_sets_apart_and_take_turns():
    prompts = [Prompt(str(at), "abc"[at % 3], "x") for at in range(7)]
    work = batches(prompts, [torch.arange(2)] * 7, 2)
    assert [[prompt.id for prompt in part] for part, _ in work] == [["0", "3"], ["1", "4"], ["2", "5"], ["6"]]


def test_interpolation_and_break_even():
    assert interpolate({1: 1.0, 3: 2.0}, 2) == 1.5
    assert interpolate({1: 1.0, 3: 2.0}, 5) == 3.0
    assert interpolate({4: 7.0}, 9) == 7.0
    assert COST.break_even() == pytest.approx((0.014 + 0.002) / 0.010)
    assert COST.break_even(3) == pytest.approx((0.013 + 0.001 + 0.001 * 2 / 3) / 0.010)
    assert CostCurve(1, 1, "general", {1: 1.0}, {}, 0).break_even() is None
    data = COST.to_dict()
    assert data["target_relative"]["1"] == 1.0 and data["break_even_tau"] == pytest.approx(1.6)


def test_verdict_for_and_against():
    good = verdict(COST, mode_numbers(SAMPLES, 0.0))
    assert good["use"] is True and good["headline"].startswith("Use it here")
    assert good["expected_ratio"] == pytest.approx(4 / 1.6) and good["efficiency"] == pytest.approx(3 / 2.5)

    slow = [sample("a", "s", PLAIN_TEXT, {HF: 10, PLAIN: 20, SPECDIFF: 16})]
    dear = CostCurve(192, 1, "general", {1: 0.010, 2: 0.020, 5: 0.050}, {4: 0.010}, 4)
    bad = verdict(dear, mode_numbers(slow, 0.0))
    assert bad["use"] is False and bad["headline"].startswith("Do not use it here")
    assert "costs 5.00 of a pass over 1" in bad["reasons"][0] and "pays from tau 6.00 on" in bad["reasons"][0]
    assert "below that" in bad["reasons"][0]
    assert any("Without a drafter specdiff is still 2.00 times" in reason for reason in bad["reasons"])

    wrong = verdict(COST, mode_numbers(SAMPLES, 0.0), equality={"passed": False})
    assert wrong["use"] is False and "not those of transformers" in wrong["headline"]


def test_verdict_suggests_a_shorter_block():
    steep = CostCurve(192, 1, "general", {1: 0.010, 2: 0.011, 5: 0.060}, {1: 0.001, 4: 0.001}, 4)
    slow = [sample("a", "s", PLAIN_TEXT, {HF: 10, PLAIN: 20, SPECDIFF: 16})]
    found = verdict(steep, mode_numbers(slow, 0.0))
    assert any("--block-size 1" in reason for reason in found["reasons"])
    assert expected_tau([0.5, 0.25, 0.25], 2) == 1.75
    assert [row["block_size"] for row in by_block(steep, [1.0, 1.0], {2: 5})] == [1, 2]


def test_rounds_that_draft_little_cost_little():
    """A drafter that often proposes nothing (prompt lookup) pays for what it proposes, not for full blocks."""
    assert COST.round_cost({4: 7}) == pytest.approx(COST.break_even())
    assert COST.round_cost({0: 1, 4: 1}) == pytest.approx(((0.010 + 0.001) + 0.016) / 2 / 0.010)
    assert COST.round_cost({4: 3}, most=3) == pytest.approx(COST.break_even(3))
    assert COST.round_cost({}) is None
    stats = GenerationStats(row_rounds=[0], emitted=[[1]])
    for proposed, emitted in ((0, 1), (4, 5), (0, 1), (2, 1)):
        stats.rounds += 1
        stats.count(0, proposed, emitted - 1, emitted)
    run = Run([list(range(9))], 0.1, 0.1, 1, 4, stats)
    found = drafting([Sample([Prompt("a", "s", "x")], [torch.arange(3)], {SPECDIFF: run})])
    assert found["proposed_lengths"] == {"0": 2, "1": 0, "2": 1, "3": 0, "4": 1}
    assert found["kept_per_round"] == [0.25, 0.25, 0.25, 0.25] and found["acceptance_by_position"][:2] == [0.5, 0.5]


def test_more_than_possible_is_called_noise():
    fast = [sample("a", "s", PLAIN_TEXT, {HF: 10, PLAIN: 20, SPECDIFF: 200})]
    assert any("not quiet, measure again" in reason for reason in verdict(COST, mode_numbers(fast, 0.0))["reasons"])
