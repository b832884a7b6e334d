"""The layout of transformers' own runner, against that runner."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafting import ANCHOR, IDS, propose
from transformers import MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specdiff import SpecDiff
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import muse
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.layout import TargetShape
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

SHAPE = TargetShape(tiny.LAYERS, tiny.VOCAB)
CASES = {"plain": {}, "windows": {"windows": (6, 6)}, "mixed windows": {"windows": (6, 0)}}


@pytest.fixture(scope="module")
def model():
    return tiny.target()


def runner(folder) -> MuseGlimmerAssistantModel:
    return MuseGlimmerAssistantModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("case", CASES)
def test_settings_round_trip(case):
    values = json.loads(json.dumps(muse.values(tiny.settings(**CASES[case]), SHAPE)))
    assert muse.settings(values, SHAPE) == tiny.settings(**CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_parity_of_one_block(tmp_path, model, case):
    """Same states as transformers' model, its mask included; ours are what the export holds."""
    exported = export(tiny.drafter(model, **CASES[case]), tmp_path, "muse", target=model)
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    assert loaded.config == exported.config
    ids = torch.tensor([IDS])
    with torch.no_grad():
        block = model.get_input_embeddings()(torch.tensor([[ANCHOR, 3, 3, 3, 3]]))
        # as a first round: the cache knows that all context is new
        from transformers.cache_utils import DFlashCache

        assistant = runner(tmp_path)
        cache = DFlashCache(config=assistant.config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(len(IDS))
        states = assistant(
            noise_embeds=block, context_hidden_states=tiny.taps_of(model, ids, loaded.taps), cache=cache,
            position_ids=torch.arange(len(IDS) + 5)[None],
        ).last_hidden_state  # fmt: skip
        logits = states[0, 1:] @ model.lm_head.weight.T
    assert propose(loaded, model).tokens[0].tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(propose(loaded, model, "token").logits[0], logits, atol=1e-4, rtol=1e-4)


def test_parity_of_whole_generations(tmp_path, model, monkeypatch):
    """Stock transformers with the export, and specdiff with what it holds: same text, same drafts in every round."""
    exported = export(tiny.drafter(model), tmp_path, "muse", target=model)
    theirs: list[list[int]] = []
    stock = DFlashTokenCandidateGenerator.get_candidates

    def watched(self, input_ids, **kwargs):
        ids, logits = stock(self, input_ids, **kwargs)
        theirs.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    prompt = torch.tensor([IDS])
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=runner(tmp_path),
        speculation_type="dflash", max_new_tokens=24, do_sample=False,
    )  # fmt: skip
    ours: list[list[int]] = []
    start = exported.start

    def recorded(request):
        session = start(request)
        draft = session.propose

        def propose(anchor, limits, noise):
            proposal = draft(anchor, limits, noise)
            ours.append(proposal.tokens[0, : int(proposal.lengths[0])].tolist())
            return proposal

        session.propose = propose
        return session

    exported.start = recorded
    out = SpecDiff(model, exported).generate(prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(out, text) and torch.equal(out, tiny.greedy(model, prompt, 24))
    rounds = [draft for draft in theirs if draft]
    assert len(rounds) > 5
    for mine, draft in zip(ours, rounds, strict=False):
        width = min(len(mine), len(draft))
        assert mine[:width] == draft[:width]


def test_the_file_says_what_that_runner_reads(tmp_path, model):
    export(tiny.drafter(model), tmp_path, "muse", target=model, dtype=torch.bfloat16)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "muse_glimmer_assistant" and values["dtype"] == "bfloat16"
    assert values["target_layer_ids"] == [0, 2] and values["block_size"] == 5
    assert values["layer_types"] == ["full_attention"] * 2, "said, since the default is sliding"
    assert not any(name.startswith("encoder") for name in DFlashDrafter.from_pretrained(tmp_path, model).state_dict())


def test_taps_for_older_versions(tmp_path, model):
    """5.19 read the state before the named layer (+1); for versions in between nobody looked."""
    for version, taps in (("5.24", [0, 2]), ("5.30.1", [0, 2]), ("5.19.0", [1, 3]), ("5.17", [1, 3])):
        export(tiny.drafter(model), tmp_path, "muse", transformers=version)
        assert json.loads((tmp_path / "config.json").read_text())["target_layer_ids"] == taps
    for version in ("5.21", "new"):
        with pytest.raises(InvalidInputError, match=version):
            export(tiny.drafter(model), tmp_path, "muse", transformers=version)
    with pytest.raises(InvalidInputError, match="'muse' only"):
        export(tiny.drafter(model), tmp_path, "zlab", transformers="5.24")


@pytest.mark.parametrize("options", [{"causal": True}, {"windows": (5, 5), "sliding_causal": True}])
def test_causal_blocks_cannot_be_held(tmp_path, model, options):
    with pytest.raises(UnsupportedError, match="causal block"):
        export(tiny.drafter(model, **options), tmp_path, "muse")


def test_what_is_refused_by_name():
    values = muse.values(tiny.settings(), SHAPE)
    with pytest.raises(FormatError, match="pass target="):
        muse.settings(values)
    for change, words in (
        ({"hidden_act": "gelu"}, "gelu"),
        ({"block_size": 1}, "counts the anchor"),
        ({"mask_token_id": 50}, "mask_token_id 50"),
        ({"target_layer_ids": [9]}, "target_layer_ids"),
    ):
        with pytest.raises(FormatError, match=words):
            muse.settings(values | change, SHAPE)
