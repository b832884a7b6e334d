"""``benchmarks/replay_tau.py`` counts the very rounds that the engine runs."""

from __future__ import annotations

import pytest
import torch
from replay_tau import rounds, show

from specdiff import SpecDiff
from specdiff.drafters.combined import CombinedDrafter
from specdiff.drafters.lookup import PromptLookup
from specdiff.drafters.train.evaluate import accepted_lengths


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
