"""The benchmark end to end on a tiny model, and its command."""

from __future__ import annotations

import argparse
import functools
import json
import math
from typing import Any

import pytest
import torch
from bench_tiny import SlantedDrafter, StubTokenizer, tiny_llama

from specdiff import SpecDiff
from specdiff.bench import cli
from specdiff.bench.arms import HF, HF_LOOKUP, PLAIN, SPECDIFF, specdiff_arm, transformers_arm
from specdiff.bench.measure import measure
from specdiff.bench.memory import peak_bytes
from specdiff.bench.prompts import Prompt
from specdiff.bench.run import BenchOptions, run_bench
from specdiff.cli.common import Pair
from specdiff.errors import InvalidInputError
from specdiff.testing import ReplayDrafter
from specdiff.tuning.measure import measure_cost

PROMPTS = [Prompt(f"p{at}", "ab"[at % 2], "hello" * (at + 1)) for at in range(4)]
QUICK = {"max_new_tokens": 24, "context": 16, "cost_seconds": 0.0}


def check_numbers(value: Any, path: str = "") -> None:
    """No NaN, no infinity, nothing negative but margins; rates and shares within [0, 1]."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_numbers(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            check_numbers(inner, f"{path}/{at}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert math.isfinite(value), path
        assert value >= 0 or path.endswith("gap"), path
        if "acceptance" in path:
            assert value <= 1, path


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    wrapped = SpecDiff(tiny_llama(32), SlantedDrafter(32, 4))
    return run_bench(
        wrapped, StubTokenizer(32), PROMPTS, BenchOptions(**QUICK, sampling=True, efficiency=True, texts=True)
    )


def test_b46_report_is_json_with_sane_numbers(report):
    data = json.loads(json.dumps(report, allow_nan=False))
    assert data == report, "keys and values survive a round trip"
    check_numbers(data)


def test_report_holds_the_decomposition(report):
    mode = report["mode"]
    assert list(mode["arms"]) == [HF, HF_LOOKUP, PLAIN, SPECDIFF]
    assert set(mode["ratios"]) == {"speculation", "kernels", "whole", "lookup"}
    assert set(mode["tau"]["by_set"]) == {"a", "b"}
    assert mode["arms"][PLAIN]["tau"] == mode["arms"][HF]["tau"] == 1.0
    assert {"1", "2", "4", "8", "16", "24", "5"} == set(report["cost"]["target"])
    assert set(report["cost"]["drafter"]) == {"1", "2", "4"}
    assert report["verdict"]["break_even_tau"] > 0 and report["cost"]["break_even_tau"] > 0
    assert report["equality"][SPECDIFF]["passed"] and report["equality"][PLAIN]["equal"] == 4
    assert [row["temperature"] for row in report["sampling"]] == [0.7, 1.0]
    assert all(row["rule"] == "block" and row["tau"]["macro"] >= 1 for row in report["sampling"])
    assert report["efficiency"] and all(row["texts"] for row in report["efficiency"])
    drafting = mode["drafting"]
    assert sum(drafting["accepted_lengths"].values()) == drafting["rounds"]
    assert all(len(line["texts"]) == 1 for line in report["samples"])


def test_arms_agree_on_greedy_text_and_count_their_passes():
    model = tiny_llama(32, eos=9)
    ids = [torch.arange(3, 9)]
    runs = {
        HF: transformers_arm(model, 0.0)(ids, 20, 0),
        HF_LOOKUP: transformers_arm(model, 0.0, lookup=True)(ids, 20, 0),
        PLAIN: specdiff_arm(SpecDiff(model, None), 0.0)(ids, 20, 0),
    }
    text = runs[HF].tokens
    assert all(run.tokens == text for run in runs.values())
    replay = ReplayDrafter(torch.tensor(text), 4, wrong_at=(3,))
    runs[SPECDIFF] = specdiff_arm(SpecDiff(model, replay), 0.0)(ids, 20, 0)
    assert runs[SPECDIFF].tokens == text
    for name, run in runs.items():
        assert run.prefill > 0 and run.decode > 0 and run.new_tokens == len(text[0]), name
    assert runs[HF].passes == runs[PLAIN].passes == len(text[0]) - 1
    assert runs[SPECDIFF].passes == math.ceil((len(text[0]) - 1) / 4)


def test_batches_leave_out_lookup_and_keep_rows(report):
    wrapped = SpecDiff(tiny_llama(32, eos=9), SlantedDrafter(32, 2))
    found = run_bench(wrapped, StubTokenizer(32), PROMPTS, BenchOptions(**QUICK, batch_size=2))
    assert HF_LOOKUP not in found["mode"]["arms"] and any("prompt lookup" in note for note in found["notes"])
    assert found["equality"][SPECDIFF]["texts"] == 4 and found["equality"][SPECDIFF]["passed"]
    check_numbers(found)


def test_sampled_and_drafterless_runs():
    wrapped = SpecDiff(tiny_llama(32), SlantedDrafter(32, 2))
    found = run_bench(wrapped, StubTokenizer(32), PROMPTS[:2], BenchOptions(**QUICK, temperature=0.7, rule="coupled"))
    assert found["equality"] is None and found["mode"]["drafting"]["rule"] == "coupled"
    assert [row["rule"] for row in found["sampling"]] == ["coupled", "coupled"]
    assert found["sampling"][0]["tau"]["macro"] == found["mode"]["tau"]["macro"]
    alone = run_bench(SpecDiff(tiny_llama(32), None), StubTokenizer(32), PROMPTS[:2], BenchOptions(**QUICK))
    assert SPECDIFF not in alone["mode"]["arms"] and alone["verdict"]["use"] is None
    check_numbers(alone)


def test_order_rotates_and_warm_up_is_not_counted():
    order: list[tuple[str, int]] = []

    def arm(name):
        def call(prompts, new, seed):
            order.append((name, new))
            return name

        return call

    work = [([prompt], [torch.arange(3)]) for prompt in PROMPTS[:3]]
    samples = measure({"a": arm("a"), "b": arm("b")}, work, 30)
    assert order[:2] == [("a", 8), ("b", 8)] and len(samples) == 3
    assert [name for name, _ in order[2:]] == ["a", "b", "b", "a", "a", "b"]
    assert all(list(sample.runs) == ["a", "b"] for sample in samples)


def test_cost_curve_leaves_no_trace_and_fits_short_models():
    model = tiny_llama(32)
    model.config.max_position_embeddings = 40
    curve = measure_cost(SpecDiff(model, SlantedDrafter(32, 4)), repeats=1, budget=0.0, context=500)
    assert curve.context < 40 and all(seconds > 0 for seconds in curve.target.values())


def test_peak_memory_sees_a_large_allocation():
    found = peak_bytes(lambda: torch.ones(64 * 2**20 // 4).sum(), torch.device("cpu"))
    assert found is None or found > 32 * 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1}, "at least 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"temperature": -1.0}, "negative"),
        ({"temperature": 1.0, "rule": "greedy"}, "contradicts"),
        ({"max_new_tokens": 600}, "prompt p0 has 5 tokens; with 600 new ones that is more than the target's 512"),
    ],
)
def test_wrong_options_are_refused_before_any_run(options, message):
    with pytest.raises(InvalidInputError, match=message):
        run_bench(SpecDiff(tiny_llama(32), None), StubTokenizer(32), PROMPTS, BenchOptions(**options))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def pair(monkeypatch):
    model = tiny_llama(32)
    drafter = SlantedDrafter(32, 4)

    def load(args):
        return Pair(SpecDiff(model, drafter), model, StubTokenizer(32), drafter, "slanted")

    monkeypatch.setattr(cli, "load_pair", load)
    monkeypatch.setattr("specdiff.bench.run.measure_cost", functools.partial(measure_cost, repeats=1))


def test_command_writes_json_and_html(pair, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abcabc", "set": "<one>"}\n{"prompt": "hello world"}\n', encoding="utf-8")
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    words = ["--prompts", str(prompts), "--max-new-tokens", "12", "--context", "8"]
    assert cli.run(parse(*words, "--json", str(out), "--html", str(page))) == 0
    shown = capsys.readouterr()
    assert "tau by set" in shown.out and "\x1b" not in shown.out and shown.err == ""
    assert json.loads(out.read_text())["names"]["drafter"] == "slanted"
    first = page.read_text()
    assert "&lt;one&gt;" in first and "<one>" not in first
    page.unlink()
    assert cli.run(parse("--from-json", str(out), "--html", str(page), "--json", "-")) == 0
    assert page.read_text() == first
    assert json.loads(capsys.readouterr().out)["specdiff_bench"] == 1


def test_command_fails_on_unequal_texts(pair, tmp_path, monkeypatch, capsys):
    def wrong(*args, **kwargs):
        report = json.loads((tmp_path / "r.json").read_text())
        report["equality"]["specdiff"]["passed"] = False
        return report

    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abcabc"}\n', encoding="utf-8")
    words = ["--prompts", str(prompts), "--max-new-tokens", "4", "--context", "8"]
    assert cli.run(parse(*words, "--json", str(tmp_path / "r.json"))) == 0
    monkeypatch.setattr("specdiff.bench.run.run_bench", wrong)
    assert cli.run(parse(*words)) == 1


def test_command_errors_come_before_the_model(monkeypatch, tmp_path):
    def never(args):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(cli, "load_pair", never)
    with pytest.raises(InvalidInputError, match="cannot read prompts"):
        cli.run(parse("--prompts", str(tmp_path / "no.jsonl")))
    with pytest.raises(InvalidInputError, match="--html: the folder"):
        cli.run(parse("--html", str(tmp_path / "no" / "x.html")))
    with pytest.raises(InvalidInputError, match="no report"):
        other = tmp_path / "x.json"
        other.write_text("{}")
        cli.run(parse("--from-json", str(other)))
    with pytest.raises(InvalidInputError, match="--efficiency"):
        cli.run(parse("--efficiency", "--batch-size", "2"))
