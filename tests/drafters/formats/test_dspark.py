"""DSpark: every slot drafts, a Markov head with tables of its own, a confidence head that may cut drafts."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafting import ANCHOR, IDS, propose
from oracle import Block

from specdiff import SpecDiff
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import dspark
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.layout import TargetShape
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

OPTIONS = tiny.EDGES["dspark"]
SHAPE = TargetShape(tiny.LAYERS, tiny.VOCAB)
PRUNED = torch.arange(5, 41, 3)


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dspark")
    export(tiny.drafter(model, **OPTIONS), folder, "dspark")
    return folder


@pytest.fixture(scope="module")
def loaded(folder, model):
    return DFlashDrafter.from_pretrained(folder, model)


def walk(folder, model, tokens, ids=None):
    """Laws ``[K, Vd]`` and estimated acceptance ``[K]`` of each slot, given the drafted tokens."""
    block = Block(folder, model)
    w = block.weights
    states = block.states(IDS, [ANCHOR, 3, 3, 3], [1, 3])
    head = model.lm_head.weight if ids is None else model.lm_head.weight[ids]
    before = torch.tensor([ANCHOR, *tokens[:-1]])
    bigram = w["markov_head.markov_w1.weight"][before]
    laws = states @ head.T + bigram @ w["markov_head.markov_w2.weight"].T
    features = torch.cat([states, bigram], -1)
    sure = torch.sigmoid(features @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"])
    return laws, sure


def test_round_trip(folder, loaded, model):
    first = tiny.drafter(model, **OPTIONS)
    assert loaded.config == first.config
    assert all(torch.equal(loaded.model.state_dict()[k], v) for k, v in first.model.state_dict().items())
    values = json.loads((folder / "config.json").read_text())
    assert values["block_size"] == 4 == loaded.block_size and values["sample_from_anchor"], "nothing but drafts"
    assert values["target_layer_ids"] == [0, 2] and values["markov_head_type"] == "vanilla"


@pytest.mark.parametrize("rule", ["greedy", "token"])
def test_parity(folder, loaded, model, rule):
    proposal = propose(loaded, model, rule)
    laws, _ = walk(folder, model, proposal.tokens[0].tolist())
    if rule == "greedy":
        assert proposal.tokens[0].tolist() == laws.argmax(-1).tolist()
    else:
        torch.testing.assert_close(proposal.logits[0], laws, atol=1e-4, rtol=1e-4)


def test_parity_of_a_pruned_one(model, tmp_path):
    drafter = tiny.drafter(model, draft_ids=PRUNED, **OPTIONS, draft_vocab_size=len(PRUNED))
    export(drafter, tmp_path, "dspark", target=model)
    proposal = propose(DFlashDrafter.from_pretrained(tmp_path, model), model)
    laws, _ = walk(tmp_path, model, proposal.tokens[0].tolist(), PRUNED)
    assert proposal.tokens[0].tolist() == PRUNED[laws.argmax(-1)].tolist()


def test_confidence_cuts_before_the_doubtful_token(folder, loaded, model):
    """The cut looks at what stands before a token, so the law of what is drafted stays what it was."""
    whole = propose(loaded, model, "token", rows=64)
    _, sure = walk(folder, model, whole.tokens[0].tolist())
    product = sure.cumprod(0)
    assert len(set(product.tolist())) > 1
    try:
        for threshold in (float(product[1]) * 0.999, float(product[1]) * 1.001, 1.0):
            loaded.min_confidence = threshold
            cut = propose(loaded, model, "token", rows=64)
            assert int(cut.lengths[0]) == int((product >= threshold).long().cumprod(0).sum())
            assert torch.equal(cut.tokens, whole.tokens) and torch.equal(cut.logits, whole.logits)
    finally:
        loaded.min_confidence = 0.0
    with pytest.raises(InvalidInputError, match="min_confidence"):
        loaded.min_confidence = 1.5
    with pytest.raises(UnsupportedError, match="no confidence head"):
        tiny.drafter(model).min_confidence = 0.5


def test_text_is_the_targets_own(loaded, model):
    prompt = torch.tensor([[5, 9, 2, 14], [7, 7, 30, 8]])
    loaded.min_confidence = 0.2
    try:
        out = SpecDiff(model, loaded).generate(prompt, max_new_tokens=20, do_sample=False)
    finally:
        loaded.min_confidence = 0.0
    assert torch.equal(out, tiny.greedy(model, prompt, 20))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ({"markov_head_type": "gated"}, "markov_head_type 'gated'"),
        ({"markov_rank": None}, "markov_rank"),
        ({"markov_rank": 0}, "at least 1"),
        ({"mask_token_id": 77}, "mask_token_id 77"),
    ],
)
def test_what_is_refused_by_name(folder, change, words):
    values = json.loads((folder / "config.json").read_text())
    with pytest.raises(FormatError, match=words):
        dspark.settings(values | change, SHAPE)


def test_other_spellings(folder):
    """Sizes under dspark_*, the depth from the target."""
    values = json.loads((folder / "config.json").read_text())
    expected = dspark.settings(values, SHAPE)
    for name, other in (
        ("block_size", "dspark_block_size"),
        ("mask_token_id", "dspark_noise_token_id"),
        ("target_layer_ids", "dspark_target_layer_ids"),
    ):
        values[other] = values.pop(name)
    del values["num_target_layers"], values["sample_from_anchor"]
    assert dspark.settings(values, SHAPE) == expected
