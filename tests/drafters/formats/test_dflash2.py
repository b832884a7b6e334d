"""DFlash 2: convolution and candidate selector, from and to its layout, and an exact left-to-right law."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafting import ANCHOR, IDS, propose
from oracle import Block, selected
from safetensors.torch import load_file, save_file

from specdiff import SpecDiff
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import dflash2
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.layout import TargetShape
from specdiff.errors import FormatError, UnsupportedError

OPTIONS = tiny.EDGES["dflash2"]
PUBLIC = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
        "mask_token_id": 201818, "output_multiplier": 0.196, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6656, "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5, "num_attention_heads": 32, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_target_layers": 52, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": 2048, "vocab_size": 202048,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash2")
    export(tiny.drafter(model, **OPTIONS), folder, "dflash2")
    return folder


@pytest.fixture(scope="module")
def loaded(folder, model):
    return DFlashDrafter.from_pretrained(folder, model)


def test_a_published_configuration():
    config = dflash2.settings(PUBLIC)
    assert (config.block_size, config.conv_kernel, config.selector_rank, config.selector_top_k) == (15, 2, 256, 16)
    assert config.windows == (2048,) * 5 and not config.sliding_causal
    assert config.final_logit_softcapping == 20.0 and config.output_multiplier == 0.196
    again = dflash2.values(config, TargetShape(52, 202048))
    assert dflash2.settings(json.loads(json.dumps(again))) == config


def test_round_trip(folder, loaded, model):
    first = tiny.drafter(model, **OPTIONS)
    assert loaded.config == first.config
    assert all(torch.equal(loaded.model.state_dict()[k], v) for k, v in first.model.state_dict().items())
    on_disk = load_file(folder / "model.safetensors")
    assert on_disk["candidate_selector.predecessor_codebook"].shape == (tiny.VOCAB, 6), "bare on disk"
    assert on_disk["layers.1.mlp_conv.base_kernel"].shape == (2, 2, tiny.HIDDEN)
    assert on_disk["layers.0.attention_conv.kernel_projection.weight"].shape == (2 * 2 * tiny.HIDDEN // 8, tiny.HIDDEN)


def test_renamed_codebooks_are_read_too(folder, loaded, model, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    renamed = {k + ".weight" if k.endswith("codebook") else k: v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again = DFlashDrafter.from_pretrained(tmp_path, model)
    assert all(torch.equal(again.model.state_dict()[k], v) for k, v in loaded.model.state_dict().items())


def test_parity(folder, loaded, model):
    block = Block(folder, model)
    states = block.states(IDS, [ANCHOR, 3, 3, 3, 3], [1, 3])[1:]
    unary = states @ model.lm_head.weight.T
    for rule in ("greedy", "token"):
        proposal = propose(loaded, model, rule)
        previous = ANCHOR
        for k, token in enumerate(proposal.tokens[0].tolist()):
            law = selected(block.weights, unary[k], states[k], previous, 5)
            if rule == "greedy":
                assert token == int(law.argmax())
            else:
                torch.testing.assert_close(proposal.logits[0, k], law, atol=1e-4, rtol=1e-4)
                assert torch.isfinite(law[token]), "drawn from the candidates"
            previous = token


def test_drawn_tokens_follow_the_reported_law(model):
    """Left to right: over many rows the second token is drawn from the law that its first token gives."""
    strong = tiny.drafter(model, **OPTIONS)
    with torch.no_grad():
        strong.model.get_parameter("candidate_selector.predecessor_codebook").mul_(4)
    proposal = propose(strong, model, "token", rows=1000, warp=lambda logits: logits / 4)
    first, second = proposal.tokens[:, 0], proposal.tokens[:, 1]
    common = int(first.mode().values)
    rows = first == common
    assert int(rows.sum()) > 200
    law = proposal.logits[rows.nonzero()[0, 0], 1].softmax(-1)
    share = torch.bincount(second[rows], minlength=tiny.VOCAB) / rows.sum()
    assert float((share - law).abs().sum()) < 0.25
    others = proposal.logits[~rows, 1].softmax(-1)
    assert float((others - law).abs().sum(-1).max()) > 0.25, "the law depends on the token before"


def test_starts_as_the_plain_drafter(model):
    """Convolutions begin as the identity and a selector of zeros as the plain argmax."""
    plain = tiny.drafter(model)
    fancy = DFlashDrafter(type(plain.model)(tiny.settings(**OPTIONS))).eval()
    fancy.model.load_state_dict(plain.model.state_dict(), strict=False)
    fancy.bind(model)
    assert torch.equal(propose(fancy, model).tokens, propose(plain, model).tokens)


def test_text_is_the_targets_own(loaded, model):
    prompt = torch.tensor([[5, 9, 2, 14], [7, 7, 30, 8]])
    out = SpecDiff(model, loaded).generate(prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(out, tiny.greedy(model, prompt, 30))


def test_training_it_is_refused(loaded):
    with pytest.raises(UnsupportedError, match="not trained"):
        loaded.states(torch.zeros(1, 4, 64), torch.ones(1, 1).long(), torch.ones(1, 1).long(), 4)


def test_missing_sizes(folder):
    values = json.loads((folder / "config.json").read_text())
    del values["dflash_config"]["selector_rank"]
    with pytest.raises(FormatError, match="selector_rank"):
        dflash2.settings(values)
    values["dflash_config"]["selector_rank"] = 6
    values["dflash_config"]["conv_group_size"] = 7
    with pytest.raises(FormatError, match="conv_group 7"):
        dflash2.settings(values)
