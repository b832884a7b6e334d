"""Exports: what a layout cannot hold is refused by name, or left out when asked; what is left is what runs."""

from __future__ import annotations

import pytest
import tiny
import torch
from drafting import propose

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import LAYOUTS
from specdiff.drafters.formats.export import export
from specdiff.drafters.formats.features import FEATURES, features, without
from specdiff.errors import InvalidInputError, UnsupportedError

PRUNED = torch.arange(5, 41, 3)
DIRECT = tiny.VARIANTS["late"]


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_plain_drafters_go_where_plain_drafters_live(tmp_path, model, layout):
    if layout in ("dflash2", "dspark"):
        with pytest.raises(
            UnsupportedError, match=rf"the {layout} layout cannot hold this drafter: a D\w+( 2)? drafter has"
        ):
            export(tiny.drafter(model), tmp_path, layout, target=model)
        return
    plain = tiny.drafter(model)
    exported = export(plain, tmp_path, layout, target=model)
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    assert loaded.config == plain.config == exported.config
    assert torch.equal(propose(loaded, model).tokens, propose(plain, model).tokens)


CANNOT = {
    "pruned-vocabulary": ("zlab", {}, PRUNED),
    "direct-path": ("zlab", DIRECT, None),
    "sequential-head": ("muse", {"markov_rank": 4}, None),
    "candidate-selector": ("muse", tiny.EDGES["selector"], None),
    "convolution": ("zlab", tiny.EDGES["convolution"], None),
    "logit-scale": ("speculators", {"output_multiplier": 0.5}, None),
    "no-qk-norm": ("zlab", {"qk_norm": False}, None),
    "normalized-taps": ("muse", {"normalize_taps": True}, None),
    "transition-head": ("zlab", {"transition_rank": 4}, None),
}


@pytest.mark.parametrize("feature", CANNOT)
def test_refused_by_name_with_the_remedy(tmp_path, model, feature):
    layout, options, ids = CANNOT[feature]
    with pytest.raises(UnsupportedError, match=rf"{layout} layout cannot hold: .*{feature}.*--without {feature}"):
        export(tiny.drafter(model, draft_ids=ids, **options), tmp_path, layout)
    assert not list(tmp_path.iterdir()), "nothing half-written"


@pytest.mark.parametrize("feature", CANNOT)
def test_exported_without_it_runs_as_exported(tmp_path, model, feature):
    layout, options, ids = CANNOT[feature]
    first = tiny.drafter(model, draft_ids=ids, **options)
    leave = features(first)
    mask = 3 if "direct-path" in leave else None
    exported = export(first, tmp_path, layout, target=model, leave_out=leave, mask_token_id=mask)
    loaded = DFlashDrafter.from_pretrained(tmp_path, model)
    assert loaded.config == exported.config and features(loaded) == []
    for rule in ("greedy", "token"):
        assert torch.equal(propose(loaded, model, rule).tokens, propose(exported, model, rule).tokens)
    assert first.config != loaded.config or first.draft_ids is not None, "the drafter itself is left as it was"


def test_features_cover_what_settings_can_say(model):
    """Every option of the settings is a feature or is refused in words: nothing is dropped silently."""
    everything = tiny.drafter(model, draft_ids=PRUNED, **tiny.VARIANTS["everything"])
    assert features(everything) == [
        "direct-path",
        "normalized-taps",
        "sequential-head",
        "no-qk-norm",
        "pruned-vocabulary",
    ]
    assert features(tiny.drafter(model)) == []
    assert set(features(tiny.drafter(model, **tiny.EDGES["dspark"]))) == {"transition-head", "confidence-head"}
    assert set(CANNOT) | {"confidence-head"} == {*FEATURES, "pruned-vocabulary"}


@pytest.mark.parametrize("layout", ["zlab", "muse"])
def test_drafting_from_the_anchor_cannot_be_held(tmp_path, model, layout):
    with pytest.raises(UnsupportedError, match="drafting from the anchor's slot") as caught:
        export(tiny.drafter(model, anchor_predicts=True), tmp_path, layout)
    assert "--without" not in str(caught.value), "there is no remedy"


def test_arguments_that_make_no_sense(tmp_path, model):
    plain, direct = tiny.drafter(model), tiny.drafter(model, **DIRECT)
    for words, call in (
        ("unknown layout", lambda: export(plain, tmp_path, "gguf")),
        ("unknown feature", lambda: without(plain, ["speed"])),
        ("has no sequential-head", lambda: without(plain, ["sequential-head"])),
        ("give its id", lambda: without(direct, ["direct-path"])),
        ("lose their direct path", lambda: without(plain, [], mask_token_id=3)),
        ("outside the vocabulary", lambda: without(direct, ["direct-path"], mask_token_id=99)),
    ):
        with pytest.raises(InvalidInputError, match=words):
            call()
    dspark = tiny.drafter(model, **tiny.EDGES["dspark"])
    with pytest.raises(UnsupportedError, match="confidence head reads"):
        without(dspark, ["transition-head"])
    pruned = tiny.drafter(model, draft_ids=PRUNED, draft_vocab_size=len(PRUNED), transition_rank=4)
    with pytest.raises(UnsupportedError, match="pruned vocabulary only"):
        without(pruned, ["pruned-vocabulary"])


def test_last_layer_is_not_exported_where_runners_disagree(tmp_path, model):
    drafter = tiny.drafter(model, target_layer_ids=(0, 3))
    export(drafter, tmp_path, "zlab")
    with pytest.raises(UnsupportedError, match="last layer"):
        export(drafter, tmp_path, "speculators", target=model)
