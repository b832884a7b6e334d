"""The plain drafter by least squares: every head looks at one distance, and what it predicts is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff.drafters.formats.export import export
from specdiff.drafters.layers import rotary
from specdiff.drafters.train.evaluate import evaluate
from specdiff.drafters.train.gather import GatherConfig, fit
from specdiff.errors import InvalidInputError

TAPS = (0, 1, 2)


def test_it_is_plain(fitted_drafter, tmp_path):
    assert fitted_drafter.config.plain and fitted_drafter.draft_ids is None and fitted_drafter.block_size == 3
    export(fitted_drafter, tmp_path, "zlab")


@torch.no_grad()
def test_every_head_looks_at_its_own_distance(fitted_model, fitted_drafter, fitted_items):
    """Attention of the masked slots, against the values that stand at each distance before them."""
    layer, config = fitted_drafter.model.stack[0], fitted_drafter.config
    ids = torch.from_numpy(fitted_items[0].document.ids)
    start = 30
    features = torch.from_numpy(np.array(fitted_items[0].taps)).float().flatten(1)[None, :start]
    places = torch.arange(start)[None]
    ((k, v),) = fitted_drafter.model.context(features, places)
    x = fitted_drafter.model.block_input(fitted_drafter.embed(ids[None, None, start]), features[:, None, -1],
                                  fitted_drafter.mask_embedding(), 4)  # fmt: skip
    normed = layer.input_layernorm(x)
    cos, sin = rotary(torch.tensor([[start]])[..., None] + torch.arange(4), config.head_dim, config.rope_theta)
    visible = torch.ones(1, 1, start, dtype=torch.bool)
    gathered = layer.self_attn(normed, k, v, visible, cos, sin)[0, 0]
    context = fitted_drafter.model.hidden_norm(fitted_drafter.model.fc(features))[0]
    line = torch.cat([context, normed[0, 0]])
    for slot in (1, 2, 3):
        at = [line[start + slot - distance] for distance in (1, 2, 3)]
        by_head = torch.stack(at).view(3, -1, 64).transpose(0, 1).reshape(-1)
        wanted = layer.self_attn.o_proj(by_head)
        assert float((gathered[slot] - wanted).norm() / wanted.norm()) < 0.05


def test_it_is_accepted(fitted_drafter, fitted_items):
    """Far above chance (one in fifty), most of all in the first slot."""
    shares = evaluate(fitted_drafter, fitted_items[:8]).by_position
    assert shares[0] > 0.12 and shares[0] >= shares[1] >= shares[2]


def test_impossible_shapes(fitted_model, fitted_items):
    with pytest.raises(InvalidInputError, match="context 128"):
        fit(fitted_model, fitted_items, TAPS, GatherConfig(3, 3, context=128))
    with pytest.raises(InvalidInputError, match="must hold 2"):
        fit(fitted_model, fitted_items, (0, 1), GatherConfig(3, 3, context=80))
    with pytest.raises(InvalidInputError, match="long enough"):
        fit(fitted_model, fitted_items[:1], TAPS, GatherConfig(90, 3, context=80))
