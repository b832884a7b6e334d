"""The families table: tiny models, the cases, the resumable log, the page; and a dozen architectures run for real."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations

import pytest
import torch
from transformers import CONFIG_MAPPING

from specdiff.compat import runner
from specdiff.compat.family import (
    MODES,
    Case,
    FamilyResult,
    all_cases,
    check_family,
    default_model,
    model_types,
    pairwise_cases,
)
from specdiff.compat.probing import probe_configuration
from specdiff.compat.runner import append_log, read_log, run_families
from specdiff.compat.table import render
from specdiff.compat.tiny import VOCABULARY, WINDOW, tiny_config

DOZEN = (
    "llama", "gpt2", "bloom", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4_text", "gemma3n_text",
    "qwen3_next", "mamba2", "lfm2",
)  # fmt: skip


def test_all_registered_architectures_are_covered():
    names = list(model_types())
    assert len(names) == len(set(names)) > 150
    assert set(DOZEN) <= set(names)


def test_grid_and_pairwise_cases():
    assert len(all_cases()) == len(set(all_cases())) == 48
    fields = ("rule", "batch", "block", "drafter")
    for turn in range(4):
        cases = pairwise_cases(turn)
        assert len(cases) == 12
        for first, second in combinations(fields, 2):
            wanted = {(getattr(case, first), getattr(case, second)) for case in all_cases()}
            assert {(getattr(case, first), getattr(case, second)) for case in cases} == wanted, (turn, first, second)
    quick = MODES["quick"](0)
    for name in fields:
        assert {getattr(case, name) for case in quick} == {getattr(case, name) for case in all_cases()}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "gemma4_text"])
def test_tiny_models_are_small_and_keep_their_kinds_of_layers(name):
    config = tiny_config(CONFIG_MAPPING[name]())
    model = default_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert config.vocab_size == VOCABULARY
    whole = getattr(CONFIG_MAPPING[name](), "layer_types", None)
    if whole is not None:
        assert set(config.layer_types) == set(whole)
    if "sliding_attention" in (whole or ()):
        assert config.sliding_window == WINDOW


def test_tiny_models_are_reproducible_and_leave_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = default_model("llama"), default_model("llama")
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", DOZEN)
def test_a_dozen_architectures_give_generates_own_text(name):
    cases = [Case("greedy", 3, WINDOW + 4, "accept-some"), Case("coupled", 1, 3, "reject-all")]
    result = check_family(name, cases, new_tokens=16)
    assert (result.status, result.why, result.cases) == ("works", "", 2)


def test_a_wrong_text_is_reported_as_wrong(monkeypatch):
    from specdiff.cache.ragged import RaggedLayer

    write = RaggedLayer._write
    monkeypatch.setattr(RaggedLayer, "_write", lambda self, buffer, states: write(self, buffer, states.flip(-1)))
    result = check_family("llama", [Case("greedy", 1, 3, "reject-all")], new_tokens=8)
    assert result.status == "works" and result.serving in (
        "foreign",
        "uncached",
    )  # the probe notices, and goes around it
    from specdiff.target import Target

    monkeypatch.undo()
    serving = Target(default_model("llama")).serving
    monkeypatch.setattr(Target, "_serving", lambda self: serving)
    monkeypatch.setattr(RaggedLayer, "_write", lambda self, buffer, states: write(self, buffer, states.flip(-1)))
    result = check_family("llama", [Case("greedy", 1, 3, "reject-all")], new_tokens=8)
    assert result.status == "wrong" and result.gap > 0.1 and "logits of ragged rounds" in result.why
    assert any("differs at token" in why for why in result.wrong)


def test_an_architecture_that_cannot_be_built_says_why():
    result = check_family("gemma3n", [], new_tokens=1) if not _has("timm") else FamilyResult("x", why="needs timm")
    assert result.status == "not built" and "timm" in result.why.lower()


def _has(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def test_log_resumes_skips_damage_and_keeps_the_latest(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    append_log(log, "quick", FamilyResult("llama", status="wrong"))
    append_log(log, "quick", FamilyResult("llama", status="works"))
    append_log(log, "full", FamilyResult("gpt2", status="works"))
    with log.open("a") as file:
        file.write('{"mode": "quick", "result": {"model')  # an interrupted write
    assert {name: result.status for name, result in read_log(log, "quick").items()} == {"llama": "works"}
    ran: list[str] = []

    def fake(name: str, mode: str, turn: int, limit: float) -> FamilyResult:
        ran.append(name)
        return FamilyResult(name, status="refused", why="no")

    monkeypatch.setattr(runner, "_in_process", fake)
    with log.open("a") as file:
        file.write("\n")
    results = run_families(log, names=["llama", "gpt2"], mode="quick")
    assert ran == ["gpt2"] and [result.status for result in results] == ["works", "refused"]
    assert json.loads(log.read_text().splitlines()[-1])["result"]["model_type"] == "gpt2"


def test_a_hanging_process_is_ended_and_reported(tmp_path):
    (result,) = run_families(tmp_path / "log.jsonl", names=["llama"], mode="full", time_limit=0.0)
    assert result.status == "failed" and "longer than 0 s" in result.why


def test_page_counts_honestly():
    results = [
        FamilyResult("a", "A", "works", kinds="full", serving="ragged"),
        FamilyResult("b", "B", "works", kinds="recurrent", serving="ragged", stepwise=True),
        FamilyResult("c", "C", "refused", "C cannot be a target: no | way"),
        FamilyResult("d", "D", "wrong", "row 0 differs"),
        FamilyResult("e", "E", "failed", "took longer"),
        FamilyResult("f", "F", "not built", "needs timm"),
    ]
    page = render(results, {"transformers": "5"}, mode="reduced")
    counts = Counter(line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| "))
    assert all(counts[name] == 1 for name in "abcdef")
    assert "2 of the 5 that can be built work (40.0%)" in page
    assert "ragged, token by token" in page and "no \\| way" in page


def test_configuration_alone_tells_how_a_model_is_served():
    serving, why = probe_configuration(CONFIG_MAPPING["gemma3_text"]())
    assert why is None and serving is not None and serving.by_type
    serving, why = probe_configuration(CONFIG_MAPPING["cpmant"]())
    assert serving is None and why is not None and "not causal" in why


@pytest.mark.slow
def test_every_architecture_in_the_reduced_set(tmp_path):
    results = run_families(tmp_path / "log.jsonl", mode="reduced")
    assert not [result.model_type for result in results if result.status in ("wrong", "failed")]
