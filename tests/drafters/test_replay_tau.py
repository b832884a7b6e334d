"""``benchmarks/replay_tau.py`` counts the very rounds that the engine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replay_tau import behind, main, rounds, show

from specdiff import SpecDiff
from specdiff.drafters.combined import CombinedDrafter, Record
from specdiff.drafters.lookup import PromptLookup
from specdiff.drafters.train.corpus import write_shard
from specdiff.drafters.train.evaluate import accepted_lengths
from specdiff.drafters.train.features import extract


def served(model, drafter, document) -> int:
    sd = SpecDiff(model, drafter, block_size=drafter.block_size)
    ids = torch.from_numpy(document.ids)[None]
    start = document.prompt_length
    out = sd.generate(
        ids[:, :start],
        attention_mask=torch.ones_like(ids[:, :start]),
        max_new_tokens=ids.shape[1] - start,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.sequences.tolist() == ids.tolist()
    return len(out.stats.emitted[0]) - 1


@pytest.mark.parametrize("kind", ["lookup", "drafter", "both"])
def test_replayed_rounds_are_those_of_serving(kind, fitted_model, fitted_drafter, fitted_items):
    serving = {"lookup": PromptLookup(), "drafter": fitted_drafter, "both": CombinedDrafter(fitted_drafter)}[kind]
    saved = 0
    for item in fitted_items[:8]:
        lengths = accepted_lengths(fitted_drafter, item, fitted_drafter.block_size, torch.device("cpu")).tolist()
        count = rounds(item.document, None if kind == "lookup" else lengths, kind != "drafter", serving.block_size)
        assert count == served(fitted_model, serving, item.document)
        saved += len(item.document) - item.document.prompt_length - 1 - count
    assert saved > 0


def test_the_mean_is_over_sets(fitted_items, capsys):
    documents = [item.document for item in fitted_items[:2]]
    news = [len(d) - d.prompt_length - 1 for d in documents]
    show("x", documents, [news[0], news[1]])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("x: ") and first.endswith("mean 1.000")


def test_what_is_behind():
    parts = {"drafter": {"a": 1.5, "b": 2.0}, "lookup": {"a": 1.0, "b": 3.0}}
    assert behind({"a": 1.5, "b": 3.0}, parts) == []
    assert behind({"a": 1.4, "b": 2.5}, parts) == [
        "a: 1.400 is below drafter's 1.500", "b: 2.500 is below lookup's 3.000",
    ]  # fmt: skip


@pytest.mark.parametrize("choice", ["its own", "always copies", "never copies"])
def test_check_fails_where_the_combined_drafter_is_behind(
    choice, fitted_model, fitted_drafter, fitted_items, tmp_path, monkeypatch, capsys
):
    """Two sets: one for which the drafter is fitted, and one of loops, which only lookup knows."""
    documents = [item.document for item in fitted_items[:4]]
    loops = [torch.arange(9 + i).repeat(20)[:80].numpy() + 4 for i in range(3)]
    documents += [replace(documents[0], ids=ids, prompt_length=20, source="loops") for ids in loops]
    write_shard(tmp_path / "texts.npz", documents)
    extract(fitted_model, documents, tmp_path / "features" / "texts", list(fitted_drafter.taps), 4)
    monkeypatch.setattr("replay_tau.load_target", lambda: (fitted_model, None))
    monkeypatch.setattr("replay_tau.load", lambda name, model: fitted_drafter)
    if choice != "its own":
        monkeypatch.setattr(Record, "prefers_copy", lambda record, match: choice == "always copies")
    if choice == "always copies":  # a drafter that is worth more than any copy of the first set
        monkeypatch.setattr("replay_tau.accepted_lengths", lambda drafter, item, *_: torch.full((80,), 3))
    arguments = ["none.jsonl", "fitted", "--work", str(tmp_path)]
    assert main(arguments) == 0, "only --check judges"
    assert main([*arguments, "--check"]) == (choice != "its own")
    out = capsys.readouterr().out
    assert ("fitted+lookup on greedy: " in out) == (choice == "always copies")
    assert ("fitted+lookup on loops: " in out) == (choice == "never copies")
