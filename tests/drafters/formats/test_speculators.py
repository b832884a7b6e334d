"""The speculators layout: what may be left out of its config, taps, maps of a pruned vocabulary, the anchor's slot."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafting import ANCHOR, IDS, propose
from oracle import Block, selected
from safetensors.torch import load_file, save_file

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import speculators
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.layout import TargetShape
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

SHAPE = TargetShape(tiny.LAYERS, tiny.VOCAB, "some/target", "LlamaForCausalLM", 256)
PRUNED = torch.arange(5, 41, 3)


@pytest.fixture(scope="module")
def model():
    return tiny.target()


def written(**options) -> dict:
    return json.loads(json.dumps(speculators.values(tiny.settings(**options), SHAPE)))


CASES = {
    "plain": {},
    "windows": {"windows": (5, 0), "sliding_causal": True},
    "windows, bidirectional": {"windows": (5, 5)},
    "anchor": {"anchor_predicts": True},
    "dflash2": tiny.EDGES["dflash2"],
    "dspark": tiny.EDGES["dspark"],
    "dspark, anchor drafts nothing": tiny.EDGES["dspark"] | {"anchor_predicts": False},
}


@pytest.mark.parametrize("case", CASES)
def test_settings_round_trip(case):
    assert speculators.settings(written(**CASES[case]), SHAPE) == tiny.settings(**CASES[case])


def test_what_the_config_says():
    values = written()
    assert values["speculators_model_type"] == "dflash" and values["aux_hidden_state_layer_ids"] == [1, 3], "+1"
    assert values["block_size"] == 5 and not values["sample_from_anchor"], "the anchor is counted"
    assert values["sliding_window_non_causal"] is True, "said, since readers disagree about the default"
    method = values["speculators_config"]["proposal_methods"][0]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 4}
    assert values["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    anchor = written(anchor_predicts=True)
    assert anchor["block_size"] == 4 == anchor["speculators_config"]["proposal_methods"][0]["speculative_tokens"]


def test_defaults_of_the_nested_configuration_may_be_left_out():
    """The library stores what differs from the class's defaults, so what is missing is Qwen3's."""
    values = written()
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"):
        del values["transformer_layer_config"][name]
    config = speculators.settings(values, SHAPE)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (32, 32, 128, 1e-6)
    assert config.rope_theta == 10000.0 and config.windows == ()


@pytest.mark.parametrize("case", ["plain", "windows", "anchor"])
def test_parity_of_a_pruned_drafter(tmp_path, model, case):
    options = CASES[case]
    export(tiny.drafter(model, draft_ids=PRUNED, **options), tmp_path, "speculators", target=model)
    files = load_file(tmp_path / "model.safetensors")
    assert files["t2d"].nonzero()[:, 0].tolist() == PRUNED.tolist()
    assert (files["d2t"] + torch.arange(len(PRUNED))).tolist() == PRUNED.tolist()
    assert torch.equal(files["lm_head.weight"], model.lm_head.weight[PRUNED])
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    assert loaded.draft_ids.tolist() == PRUNED.tolist() and loaded.own_head is None, "they are the target's rows"
    windows = options.get("windows", (0, 0))
    block = Block(tmp_path, model, [(bool(w) and options["sliding_causal"], w or None) for w in windows])
    inputs = [ANCHOR, 3, 3, 3] if case == "anchor" else [ANCHOR, 3, 3, 3, 3]
    states = block.states(IDS, inputs, block.values["aux_hidden_state_layer_ids"])[-4:]
    logits = states @ files["lm_head.weight"].T
    chosen = PRUNED[logits.argmax(-1)]
    assert propose(loaded, model).tokens[0].tolist() == chosen.tolist()
    torch.testing.assert_close(propose(loaded, model, "token").logits[0], logits, atol=1e-4, rtol=1e-4)


def test_parity_of_dflash2(tmp_path, model):
    export(tiny.drafter(model, **CASES["dflash2"]), tmp_path, "speculators", target=model)
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    block = Block(tmp_path, model)
    states = block.states(IDS, [ANCHOR, 3, 3, 3, 3], [1, 3])[1:]
    previous = ANCHOR
    for k, token in enumerate(propose(loaded, model).tokens[0].tolist()):
        law = selected(block.weights, states[k] @ model.lm_head.weight.T, states[k], previous, 5)
        assert token == int(law.argmax())
        previous = token


@pytest.mark.parametrize("pruned", [False, True], ids=["all ids", "pruned"])
@pytest.mark.parametrize("case", ["dspark", "dspark, anchor drafts nothing"])
def test_parity_of_dspark(tmp_path, model, case, pruned):
    """Tokens, laws, and where its confidence head cuts, by the book from the files alone."""
    options = CASES[case] | ({"draft_vocab_size": len(PRUNED)} if pruned else {})
    export(tiny.drafter(model, draft_ids=PRUNED if pruned else None, **options), tmp_path, "speculators", target=model)
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    block = Block(tmp_path, model)
    assert block.values["speculators_model_type"] == "dspark"
    w, ids = block.weights, PRUNED if pruned else torch.arange(tiny.VOCAB)
    inputs = [ANCHOR, 3, 3, 3] if options["anchor_predicts"] else [ANCHOR, 3, 3, 3, 3]
    states = block.states(IDS, inputs, block.values["aux_hidden_state_layer_ids"])[-4:]
    for rule in ("greedy", "token"):
        proposal = propose(loaded, model, rule)
        before = torch.tensor([ANCHOR, *proposal.tokens[0, :-1].tolist()])
        bigram = w["markov_head.markov_w1.weight"][before]
        laws = states @ model.lm_head.weight[ids].T + bigram @ w["markov_head.markov_w2.weight"].T
        if rule == "greedy":
            assert proposal.tokens[0].tolist() == ids[laws.argmax(-1)].tolist()
        else:
            torch.testing.assert_close(proposal.logits[0], laws, atol=1e-4, rtol=1e-4)
    features = torch.cat([states, bigram], -1)
    sure = torch.sigmoid(features @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]).cumprod(0)
    for slot in range(4):
        for nudge, length in ((0.999, slot + 1), (1.001, slot)):
            loaded.min_confidence = float(sure[slot]) * nudge
            assert int(propose(loaded, model, "token").lengths[0]) == length


def test_a_head_of_its_own_is_used_and_kept(tmp_path, model):
    """A checkpoint whose output rows are not the target's drafts with its own, and says so when saved."""
    export(tiny.drafter(model, draft_ids=PRUNED), tmp_path, "speculators", target=model)
    files = load_file(tmp_path / "model.safetensors")
    files["lm_head.weight"] = files["lm_head.weight"].flip(0).contiguous()
    files["embed_tokens.weight"] = model.get_input_embeddings().weight.detach() * 2
    save_file(files, tmp_path / "model.safetensors")
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    states = Block(tmp_path, model).states(IDS, [ANCHOR, 3, 3, 3, 3], [1, 3], scale=2.0)[1:]
    chosen = PRUNED[(states @ files["lm_head.weight"].T).argmax(-1)].tolist()
    assert propose(loaded, model).tokens[0].tolist() == chosen
    loaded.save_pretrained(tmp_path / "again")
    again = DFlashDrafter.from_pretrained(tmp_path / "again", model)
    assert propose(again, model).tokens[0].tolist() == chosen
    for layout in ("zlab", "muse"):
        with pytest.raises(UnsupportedError, match="of its own"):
            export(again, tmp_path / layout, layout)
    export(again, tmp_path / "spec", "speculators", target=model)
    assert propose(DFlashDrafter.from_pretrained(tmp_path / "spec", model), model).tokens[0].tolist() == chosen


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3' are not supported; dflash"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "novel"}}, "'novel'"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "embedding output"),
        ({"aux_hidden_state_layer_ids": [2, 4]}, "last layer"),
        ({"aux_hidden_state_layer_ids": [9]}, "target_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"mask_token_id": 50}, "mask_token_id 50"),
        ({"block_size": 1}, "leaves no token"),
        ({"target_hidden_size": 99}, "target_hidden_size 99"),
    ],
)
def test_what_is_refused_by_name(change, words):
    with pytest.raises(FormatError, match=words):
        speculators.settings(written() | change, SHAPE)


def test_dspark_must_say_whether_its_anchor_drafts():
    values = written(**CASES["dspark"])
    del values["sample_from_anchor"]
    with pytest.raises(FormatError, match="sample_from_anchor"):
        speculators.settings(values, SHAPE)


def test_the_target_is_needed():
    with pytest.raises(FormatError, match="pass target="):
        speculators.settings(written())
    with pytest.raises(InvalidInputError, match="give target="):
        export(tiny.drafter(tiny.target(), draft_ids=PRUNED), "nowhere", "speculators")


@pytest.mark.parametrize("fault", ["missing", "short", "contradicting"])
def test_maps_that_do_not_fit(tmp_path, model, fault):
    export(tiny.drafter(model, draft_ids=PRUNED), tmp_path, "speculators", target=model)
    files = load_file(tmp_path / "model.safetensors")
    if fault == "missing":
        del files["d2t"]
    elif fault == "short":
        files["d2t"] = files["d2t"][:-1].contiguous()
    else:
        files["t2d"] = files["t2d"].flip(0).contiguous()
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"no d2t|d2t has 11|do not name the same"):
        DFlashDrafter.from_pretrained(tmp_path, model)
