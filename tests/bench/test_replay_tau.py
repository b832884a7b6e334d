"""``benchmarks/replay_tau.py`` counts the very rounds that the engine runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specdiff import SpecDiff
from specdiff.drafters.combined import CombinedDrafter
from specdiff.drafters.lookup import PromptLookup
from specdiff.drafters.train.evaluate import accepted_lengths

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks"), str(HERE.parent / "drafters")]

from replay_tau import rounds, show  # noqa: E402
from test_gather import drafter, items, model  # noqa: E402, F401  (fixtures: a drafter that is accepted now and then)


def served(model, drafter, document) -> int:  # noqa: F811
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
def test_replayed_rounds_are_those_of_serving(kind, model, drafter, items):  # noqa: F811
    serving = {"lookup": PromptLookup(), "drafter": drafter, "both": CombinedDrafter(drafter)}[kind]
    saved = 0
    for item in items[:8]:
        lengths = accepted_lengths(drafter, item, drafter.block_size, torch.device("cpu")).tolist()
        count = rounds(item.document, None if kind == "lookup" else lengths, kind != "drafter", serving.block_size)
        assert count == served(model, serving, item.document)
        saved += len(item.document) - item.document.prompt_length - 1 - count
    assert saved > 0


def test_the_mean_is_over_sets(items, capsys):  # noqa: F811
    documents = [item.document for item in items[:2]]
    news = [len(d) - d.prompt_length - 1 for d in documents]
    show("x", documents, [news[0], news[1]])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("x: ") and first.endswith("mean 1.000")
