"""Makes ``tiny`` importable for the tests of this folder, and fits a drafter that is accepted now and then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from specdiff.drafters.dflash import DFlashDrafter
    from specdiff.drafters.train.features import Features

sys.path.insert(0, str(Path(__file__).parent))

FITTED_TAPS = (0, 1, 2)


@pytest.fixture(scope="session")
def fitted_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def fitted_items(fitted_model, tmp_path_factory) -> list[Features]:
    import tiny

    from specdiff.drafters.train.corpus import read_shard
    from specdiff.drafters.train.features import open_or_extract

    folder = tmp_path_factory.mktemp("corpus")
    tiny.write_greedy_corpus(folder, fitted_model, 24, prompt=6, new=60)
    shard = open_or_extract(fitted_model, folder / "greedy.npz", folder / "features", FITTED_TAPS, 4)
    assert len(read_shard(folder / "greedy.npz")) == 24
    return [shard[i] for i in range(24)]


@pytest.fixture(scope="session")
def fitted_drafter(fitted_model, fitted_items) -> DFlashDrafter:
    from specdiff.drafters.train.gather import GatherConfig, fit

    return fit(fitted_model, fitted_items, FITTED_TAPS, GatherConfig(3, 3, context=80, ridge=1e-4))
