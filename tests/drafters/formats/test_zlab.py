"""The z-lab layout: old and new revisions, what is refused, parity with the layout by the book."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafting import ANCHOR, IDS, propose
from oracle import Block

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import zlab
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.layout import TargetShape
from specdiff.errors import FormatError

SHAPE = TargetShape(tiny.LAYERS, tiny.VOCAB)
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    "mixed windows": {"windows": (5, 0), "sliding_causal": True},
    "windows, bidirectional": {"windows": (5, 5)},
    "window shorter than the block": {"windows": (2, 2)},
}


def written(**options) -> dict:
    return json.loads(json.dumps(zlab.values(tiny.settings(**options), SHAPE)))


@pytest.mark.parametrize("case", CASES)
def test_settings_round_trip(case):
    assert zlab.settings(written(**CASES[case])) == tiny.settings(**CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_parity(tmp_path, case):
    """Exported, loaded, drafted: the tokens and the laws of the layout by the book."""
    options = CASES[case]
    model = tiny.target()
    export(tiny.drafter(model, **options), tmp_path, "zlab")
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    kinds = [
        (options.get("sliding_causal" if window else "causal", False), window or None)
        for window in options.get("windows", (0, 0))
    ]
    block = Block(tmp_path, model, kinds)
    scale = options.get("input_embedding_scale", 1.0)
    states = block.states(IDS, [ANCHOR, 3, 3, 3, 3], [1, 3], scale)[1:]
    logits = states @ model.lm_head.weight.T * options.get("output_multiplier", 1.0)
    if cap := options.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    assert propose(loaded, model).tokens[0].tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(propose(loaded, model, "token").logits[0], logits, atol=1e-4, rtol=1e-4)


def test_old_and_new_revisions():
    """Old: sizes at the top. New: nested, the rotary base in ``rope_parameters``. Nested wins where both speak."""
    old = written()
    del old["rope_parameters"], old["dflash_config"]["block_size"], old["is_causal"]
    new = written()
    del new["block_size"], new["rope_theta"], new["is_causal"]
    new["dflash_config"]["causal"] = False
    assert zlab.settings(old) == zlab.settings(new) == tiny.settings()
    new["block_size"] = 99
    assert zlab.settings(new).block_size == 4


def test_default_taps():
    config = written(num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33))
    assert zlab.default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert zlab.default_taps(36, 1) == (18,)
    del config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["num_taps"] = 5
    assert zlab.settings(config).target_layer_ids == (1, 9, 17, 25, 33)


def test_causality_is_said_or_follows_the_kind_of_layer():
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    base = written() | sliding
    del base["is_causal"]
    silent = zlab.settings(base)
    assert (silent.windows, silent.causal, silent.sliding_causal) == ((5, 0), False, True)
    for said in ({"is_causal": False}, {"is_causal": True}):
        config = zlab.settings(base | said)
        assert config.causal == config.sliding_causal == said["is_causal"]
    nested = base | {"dflash_config": base["dflash_config"] | {"causal": True}}
    assert zlab.settings(nested).causal and zlab.settings(nested).sliding_causal
    assert not zlab.settings(nested | {"is_causal": False}).causal, "the top level has the last word"


def test_windows_by_flag():
    config = written()
    del config["is_causal"], config["layer_types"]
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 7}
    assert zlab.settings(config).windows == (7, 7)
    assert not zlab.settings(config).sliding_causal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": None, "dflash_config": {"target_layer_ids": [0], "mask_token_id": 3}}, "block_size"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 3, "block_size": 1}}, "counts the anchor"),
        ({"dflash_config": {"target_layer_ids": [4], "mask_token_id": 3, "block_size": 5}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 50, "block_size": 5}}, "mask_token_id 50"),
        ({"dflash_config": {"target_layer_ids": [0], "block_size": 5}}, "mask_token_id is needed"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "windows"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"specdiff": {"novel": 1}}, "novel"),
        ({"specdiff": {"block_size": 0}}, "block_size must be at least 1"),
    ],
)
def test_what_is_refused_by_name(change, words):
    with pytest.raises(FormatError, match=words):
        zlab.settings(written() | change)


def test_pickled_mask_embeddings_are_refused(tmp_path):
    model = tiny.target()
    export(tiny.drafter(model), tmp_path, "zlab")
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(FormatError, match="only safetensors"):
        DFlashDrafter.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_block_size_survives_and_means_drafted_tokens(tmp_path, size):
    """B39: the anchor is counted on disk and not in specdiff."""
    model = tiny.target()
    drafter = tiny.drafter(model, block_size=size - 1)
    export(drafter, tmp_path, "zlab")
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == size
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    assert loaded.block_size == size - 1
    assert propose(loaded, model).tokens.shape == (1, size - 1)
