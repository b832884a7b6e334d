"""Long use of one object: memory stays flat and the text right. Slow; ``SPECDIFF_SOAK_ROUNDS`` sets the length."""

from __future__ import annotations

import gc
import os

import psutil
import pytest
import torch

from specdiff import SpecDiff
from specdiff.compat.family import default_model
from specdiff.compat.tiny import FIRST_ORDINARY_ID, VOCABULARY
from specdiff.testing import ReplayDrafter

KINDS = ("llama", "gemma3_text", "qwen3_next")
NEW = 40


def tensors() -> int:
    """Live tensors of the process."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, torch.Tensor))


def resident() -> float:
    """MiB."""
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_300_calls_are_flat(name):
    model = default_model(name)
    ids = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    text = torch.cat([model.generate(row, max_new_tokens=4, do_sample=False)[:, 6:] for row in ids.split(1)])
    sd = SpecDiff(model, ReplayDrafter(text, block_size=3, wrong_at=(1,)), fast="off")
    for turn in range(300):
        if turn == 20:
            held, memory = tensors(), resident()
        assert torch.equal(sd.generate(ids, max_new_tokens=4, do_sample=False)[:, 6:], text)
    assert tensors() <= held
    assert resident() < memory + 24


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_rounds_on_one_object(name):
    rounds = int(os.environ.get("SPECDIFF_SOAK_ROUNDS", "600"))
    model = default_model(name)
    ids = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(0))
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, 5:]
    sd = SpecDiff(model, ReplayDrafter(text, block_size=3, wrong_at=(0,)), fast="off")  # one token per round
    done, memory, held = 0, 0.0, 0
    while done < rounds:
        out = sd.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        done += out.stats.rounds
        if not memory and done >= rounds // 5:
            memory, held = resident(), tensors()
    assert torch.equal(out.sequences[:, 5:], text)
    assert tensors() <= held and resident() < memory + 24
