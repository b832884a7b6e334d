"""The plain drafter by least squares: every head looks at one distance, and what it predicts is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff.drafters.formats.export import export
from specdiff.drafters.layers import rotary
from specdiff.drafters.train.corpus import read_shard
from specdiff.drafters.train.evaluate import evaluate
from specdiff.drafters.train.features import open_or_extract
from specdiff.drafters.train.gather import GatherConfig, fit
from specdiff.errors import InvalidInputError

TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def items(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    tiny.write_greedy_corpus(folder, model, 24, prompt=6, new=60)
    shard = open_or_extract(model, folder / "greedy.npz", folder / "features", TAPS, 4)
    assert len(read_shard(folder / "greedy.npz")) == 24
    return [shard[i] for i in range(24)]


@pytest.fixture(scope="module")
def drafter(model, items):
    return fit(model, items, TAPS, GatherConfig(3, 3, context=80, ridge=1e-4))


def test_it_is_plain(drafter, tmp_path):
    assert drafter.config.plain and drafter.draft_ids is None and drafter.block_size == 3
    export(drafter, tmp_path, "zlab")


@torch.no_grad()
def test_every_head_looks_at_its_own_distance(model, drafter, items):
    """Attention of the masked slots, against the values that stand at each distance before them."""
    layer, config = drafter.model.stack[0], drafter.config
    ids = torch.from_numpy(items[0].document.ids)
    start = 30
    features = torch.from_numpy(np.array(items[0].taps)).float().flatten(1)[None, :start]
    places = torch.arange(start)[None]
    ((k, v),) = drafter.model.context(features, places)
    x = drafter.model.block_input(drafter.embed(ids[None, None, start]), features[:, None, -1],
                                  drafter.mask_embedding(), 4)  # fmt: skip
    normed = layer.input_layernorm(x)
    cos, sin = rotary(torch.tensor([[start]])[..., None] + torch.arange(4), config.head_dim, config.rope_theta)
    visible = torch.ones(1, 1, start, dtype=torch.bool)
    gathered = layer.self_attn(normed, k, v, visible, cos, sin)[0, 0]
    context = drafter.model.hidden_norm(drafter.model.fc(features))[0]
    line = torch.cat([context, normed[0, 0]])
    for slot in (1, 2, 3):
        at = [line[start + slot - distance] for distance in (1, 2, 3)]
        by_head = torch.stack(at).view(3, -1, 64).transpose(0, 1).reshape(-1)
        wanted = layer.self_attn.o_proj(by_head)
        assert float((gathered[slot] - wanted).norm() / wanted.norm()) < 0.05


def test_it_is_accepted(drafter, items):
    """Far above chance (one in fifty), most of all in the first slot."""
    shares = evaluate(drafter, items[:8]).by_position
    assert shares[0] > 0.12 and shares[0] >= shares[1] >= shares[2]


def test_impossible_shapes(model, items):
    with pytest.raises(InvalidInputError, match="context 128"):
        fit(model, items, TAPS, GatherConfig(3, 3, context=128))
    with pytest.raises(InvalidInputError, match="must hold 2"):
        fit(model, items, (0, 1), GatherConfig(3, 3, context=80))
    with pytest.raises(InvalidInputError, match="long enough"):
        fit(model, items[:1], TAPS, GatherConfig(90, 3, context=80))
