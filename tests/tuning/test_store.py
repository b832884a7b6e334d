"""Where measured costs are kept, and what they are measured for."""

from __future__ import annotations

import json

import pytest
import torch
from bench.bench_tiny import SlantedDrafter, tiny_llama
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from specdiff import SpecDiff
from specdiff.cli import main
from specdiff.drafters.combined import CombinedDrafter
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter
from specdiff.tuning import measure, store
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.measure import Judge, measure_cost
from specdiff.warp import BlockWarp

CURVE = CostCurve(64, 1, "general", {1: 1.0, 2: 1.1, 9: 1.5}, {1: 0.1, 8: 0.3}, 8, warm=0.01, prefill=0.2)
GREEDY = Judge("greedy", BlockWarp(None))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts measurements; an empty cache folder and memory."""
    calls = []
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_BY_NAME", {})
    monkeypatch.setattr(store, "measure", lambda *given: calls.append(given) or CURVE)
    return calls


def wrapped(drafter=None, **options):
    return SpecDiff(tiny_llama(), drafter or RandomDrafter(12), block_size="auto", **options)


def test_measured_once_for_this_and_for_later_processes(measured, monkeypatch):
    pair = wrapped()
    curve, note = store.curve_for(pair, pair.target, 1, GREEDY)
    assert curve == CURVE and "measured" in note
    assert store.curve_for(pair, pair.target, 1, GREEDY) == (CURVE, None)
    assert store.curve_for(wrapped(), pair.target, 1, GREEDY) == (CURVE, None)  # the same kind of pair
    monkeypatch.setattr(store, "_BY_NAME", {})  # another process
    assert store.curve_for(pair, pair.target, 1, GREEDY) == (CURVE, None)
    assert len(measured) == 1


def test_what_costs_something_else_is_measured_apart(measured):
    pair = wrapped()
    sampling = Judge("block", BlockWarp(None))
    warm = Judge("block", BlockWarp(LogitsProcessorList([TemperatureLogitsWarper(0.7)])))
    nucleus = Judge("block", BlockWarp(LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)])))
    for count, judge in enumerate((GREEDY, sampling, warm, nucleus), 1):
        store.curve_for(pair, pair.target, 1, judge)
        assert len(measured) == count
    store.curve_for(pair, pair.target, 1, Judge("token", BlockWarp(None)))  # both ratio rules cost the same
    assert len(measured) == 4
    for rows, batch in ((2, None), (4, 4), (7, None), (16, 16), (300, None)):
        before = len(measured)
        store.curve_for(pair, pair.target, rows, GREEDY)
        assert len(measured) == before + (batch is not None)
    others = [wrapped(RandomDrafter(12, block_size=3)), wrapped(CombinedDrafter(RandomDrafter(12)))]
    names = {store.pair_name(pair), *(store.pair_name(other) for other in others)}
    assert len(names) == 3
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert store.pair_name(pair) not in names
    finally:
        torch.set_num_threads(threads)


def test_a_drafter_that_does_not_describe_itself_is_kept_in_memory(measured, tmp_path):
    drafter = SlantedDrafter(12)
    pair = wrapped(drafter)
    for _ in range(2):
        store.curve_for(pair, pair.target, 1, GREEDY)
    assert len(measured) == 1 and not list(tmp_path.rglob("*.json"))
    other = wrapped(SlantedDrafter(12))
    store.curve_for(other, other.target, 1, GREEDY)
    assert len(measured) == 2
    assert store.pair_name(wrapped(CombinedDrafter(drafter))) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"target": {"1": 0}}'])
def test_damaged_files_are_measured_anew(measured, tmp_path, caplog, text):
    pair = wrapped()
    store.curve_for(pair, pair.target, 1, GREEDY)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(text)
    store._BY_NAME.clear()
    assert store.curve_for(pair, pair.target, 1, GREEDY)[0] == CURVE
    assert len(measured) == 2 and "measuring anew" in caplog.text
    assert CostCurve.from_dict(json.loads(file.read_text())) == CURVE


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(measured, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path / "file"))
    pair = wrapped()
    for _ in range(2):
        assert store.curve_for(pair, pair.target, 1, GREEDY)[0] == CURVE
    assert len(measured) == 1 and "cannot be kept" in caplog.text


def test_forgetting_a_pair_leaves_others(measured, tmp_path):
    pair, other = wrapped(), wrapped(RandomDrafter(12, block_size=3))
    for one in (pair, other):
        store.curve_for(one, one.target, 1, GREEDY)
    store.forget(pair)
    assert len(list(tmp_path.rglob("*.json"))) == 1
    store.curve_for(other, other.target, 1, GREEDY)
    store.curve_for(pair, pair.target, 1, GREEDY)
    assert len(measured) == 3


@pytest.mark.parametrize("rule", ["greedy", "block", "coupled"])
def test_a_measurement_covers_the_whole_round_and_closes_what_it_opened(rule):
    model = tiny_llama(vocab=32)
    drafter = RandomDrafter(32, block_size=4)
    closed, counts = [], []
    start = drafter.start

    def watched(request):
        assert request.rule == rule and request.prompt_lengths is not None
        session = start(request)
        session.close = lambda: closed.append(1)
        session.commit = lambda tokens, count, taps: counts.append(int(count[0]))
        return session

    drafter.start = watched
    judge = Judge(rule, BlockWarp(LogitsProcessorList([TopPLogitsWarper(0.9)])))
    curve = measure_cost(
        SpecDiff(model, drafter, block_size=2), inputs=(1, 2, 5), block=4, repeats=1, budget=0.0, judge=judge
    )
    assert set(curve.target) == {1, 2, 5} and set(curve.drafter) == {1, 2, 4} and curve.block_size == 4
    assert min(*curve.target.values(), *curve.drafter.values(), curve.prefill) > 0 and curve.warm >= 0
    assert closed == [1] and counts.count(1) == 5 * 16 and counts[0] == curve.context


@pytest.mark.parametrize(("cost", "limit", "expected"), [(1.0, 6.0, [1, 1, 2]), (1.0, 9.5, [1, *[1, 1, 2, 2] * 3])])
def test_a_limit_ends_a_slow_measurement(monkeypatch, cost, limit, expected):
    calls, clock = [], [0.0]

    def call(size):
        calls.append(size)
        clock[0] += cost

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure._medians(call, [1, 2], 50, 0.0, limit, torch.device("cpu"))
    assert calls == expected and found == {1: cost, 2: cost}  # a call to warm up; a turn thrown away, two kept


def test_tune_measures_prints_and_keeps(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_BY_NAME", {})
    monkeypatch.setattr(store, "CAREFUL_REPEATS", 1)
    command = ["tune", "--target", str(tiny_folder), "--drafter", "lookup"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "greedy, batch 1" in shown and "sampling, batch 1" in shown and "length that pays most" in shown
    assert len(list(tmp_path.rglob("*.json"))) == 2
    assert main([*command, "--json", "--batch-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"greedy, batch 4", "sampling, batch 4"}
    assert all(curve["best"][0]["chance"] == 0.3 for curve in found.values())
    assert len(list(tmp_path.rglob("*.json"))) == 2  # anew: what was known before is dropped


@pytest.mark.parametrize("wrong", [["--drafter", "none"], ["--block-size", "3"]])
def test_tune_refuses_what_leaves_nothing_to_tune(wrong, capsys):
    assert main(["tune", *wrong]) != 0
    assert "specdiff:" in capsys.readouterr().err


def test_a_drafter_may_insist_on_its_rows(measured, monkeypatch):
    def of_two_rows(wrapped, target, batch, judge, repeats, seconds):
        measured.append(batch)
        if batch != 2:
            raise InvalidInputError("ReplayDrafter has 2 rows")
        return CURVE

    monkeypatch.setattr(store, "measure", of_two_rows)
    pair = wrapped()
    assert store.curve_for(pair, pair.target, 2, GREEDY)[0] == CURVE and measured == [1, 2]
    with pytest.raises(InvalidInputError, match="2 rows"):
        store.curve_for(pair, pair.target, 4, GREEDY)


def test_short_windows_are_measured_behind_less():
    pair = wrapped()
    pair.target.refuses = lambda capacity: "too long" if capacity > 100 else None
    curve = measure_cost(pair, pair.target, inputs=(1, 2), repeats=1, budget=0.0)
    assert 1 < curve.context < 100
