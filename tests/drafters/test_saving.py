"""Drafters on disk: specdiff's own files, options, shards, errors, the loader's door."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specdiff.drafters import saving
from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import files
from specdiff.drafters.loading import load, zoo
from specdiff.drafters.lookup import PromptLookup
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

Z_LAB_KEYS = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
}


@pytest.mark.parametrize("variant", [*tiny.VARIANTS, *tiny.EDGES])
def test_round_trip(tmp_path, variant):
    model = tiny.target()
    ids = torch.arange(5, 40, 3)
    options = tiny.VARIANTS.get(variant) or tiny.EDGES.get(variant) or {}
    if options.get("transition_rank"):
        options = options | {"draft_vocab_size": len(ids)}
    drafter = tiny.drafter(model, draft_ids=ids, **options)
    drafter.save_pretrained(tmp_path)
    again = DFlashDrafter.from_pretrained(tmp_path, model)
    assert again.config == drafter.config
    assert again.draft_ids.tolist() == ids.tolist()
    want, got = drafter.model.state_dict(), again.model.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[k], got[k]) for k in want)
    assert torch.equal(again.head, model.lm_head.weight[ids])


def test_plain_layout_is_exactly_z_lab(tmp_path):
    drafter = tiny.drafter(tiny.target())
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == Z_LAB_KEYS
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == drafter.block_size + 1, "that layout counts the anchor"
    assert config["dflash_config"] == {"target_layer_ids": [0, 2], "mask_token_id": 3, "block_size": 5}
    assert "specdiff" not in config
    shape = load_file(tmp_path / "model.safetensors")["fc.weight"].shape
    assert shape == (tiny.HIDDEN, 2 * tiny.HIDDEN)


def test_nothing_of_the_target_is_written(tmp_path):
    model = tiny.target()
    drafter = tiny.drafter(model, **tiny.VARIANTS["everything"])
    drafter.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert not any(t.shape[0] == tiny.VOCAB for t in written.values() if t.dim() == 2)


def test_weights_that_do_not_fit(tmp_path):
    drafter = tiny.drafter(tiny.target())
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = {k: v for k, v in tensors.items() if k != "norm.weight"} | {"lm_head.weight": torch.zeros(2)}
    save_file(lost, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"missing \['norm.weight'\], left over \['lm_head.weight'\]"):
        saving.load(tmp_path)
    save_file(tensors | {"norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"norm\.weight has shape"):
        saving.load(tmp_path)


def test_shards_and_dtype(tmp_path):
    model = tiny.target()
    drafter = tiny.drafter(model, draft_ids=torch.arange(20))
    saving.save(drafter, tmp_path, dtype=torch.bfloat16, max_shard_bytes=12_000)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and all((tmp_path / f).stat().st_size < 16_000 for f in shards)
    again = load(tmp_path, model)
    assert again.model.fc.weight.dtype == torch.float32
    assert torch.equal(again.model.fc.weight, drafter.model.fc.weight.bfloat16().float())
    drafter.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / files.INDEX).exists()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing"):
        load(tmp_path, model)


def test_the_door(tmp_path):
    model = tiny.target()
    assert isinstance(load("lookup"), PromptLookup)
    tiny.drafter(model).save_pretrained(tmp_path / "d")
    assert load(tmp_path / "d", model).bound
    both = load(f"{tmp_path / 'd'}+lookup", model)
    assert both.taps == (0, 2) and both.block_size == 16
    with pytest.raises(UnsupportedError, match="pass target="):
        load(tmp_path / "d")
    with pytest.raises(FormatError, match="not a folder, not in the zoo"):
        load("no-such-drafter", model)
    (tmp_path / "d" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(FormatError, match="LlamaForCausalLM"):
        load(tmp_path / "d", model)


def test_wrong_targets_are_refused():
    model = tiny.target()
    drafter = tiny.drafter(model)
    with pytest.raises(UnsupportedError, match="hidden_size"):
        other = type(model)(type(model.config)(**(model.config.to_dict() | {"hidden_size": 64})))
        drafter.bind(other)
    with pytest.raises(UnsupportedError, match="head has"):
        drafter.bind(tiny.target(vocab=40))


def test_binding_leaves_the_target_alone():
    model = tiny.target()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = model.config.to_dict()
    drafter = tiny.drafter(model, **tiny.VARIANTS["everything"])
    assert not any(p.data_ptr() == model.lm_head.weight.data_ptr() for p in drafter.parameters())
    drafter.to(torch.bfloat16)
    assert model.config.to_dict() == config and model.lm_head.weight.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"target_layer_ids": ()},
        {"target_layer_ids": (4,)},
        {"mask_token_id": tiny.VOCAB},
        {"mask_token_id": None},
        {"num_kv_heads": 3},
        {"head_dim": 7},
        {"num_layers": 0},
        {"correction_window": 0},
    ],
)
def test_impossible_settings(change):
    with pytest.raises(InvalidInputError):
        tiny.settings(**change)


def test_settings_survive_json():
    config = tiny.settings(**tiny.VARIANTS["everything"])
    assert DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(FormatError, match="newer"):
        DFlashConfig.from_dict(config.to_dict() | {"novel": 1})
    with pytest.raises(FormatError, match="incomplete"):
        DFlashConfig.from_dict({"block_size": 3})


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [tiny.VOCAB], [-1, 2]])
def test_impossible_draft_vocabularies(ids):
    with pytest.raises(InvalidInputError):
        tiny.drafter(tiny.target(), draft_ids=torch.tensor(ids, dtype=torch.long))


def test_push_uploads_the_folder(tmp_path, monkeypatch):
    """No network: the hub's client is replaced, what it is told is checked."""
    import huggingface_hub

    told = {}

    class Api:
        def __init__(self, token=None):
            told["token"] = token

        def create_repo(self, repo_id, private=None, exist_ok=False):
            told["repo"] = (repo_id, private, exist_ok)
            return type("Url", (), {"repo_id": f"me/{repo_id}"})()

        def upload_folder(self, folder_path, repo_id, revision, commit_message):
            told["files"] = sorted(p.name for p in folder_path.iterdir())
            told["to"] = (repo_id, revision, commit_message)
            return type("Commit", (), {"commit_url": "https://hub/commit"})()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    url = tiny.drafter(tiny.target()).push_to_hub("mine", private=True, token="t", commit_message="first")
    assert url == "https://hub/commit" and told["token"] == "t"
    assert told["repo"] == ("mine", True, True)
    assert told["files"] == ["config.json", "model.safetensors"]
    assert told["to"] == ("me/mine", None, "first")


def test_hub_options_reach_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    model = tiny.target()
    tiny.drafter(model).save_pretrained(tmp_path)
    told = {}

    def snapshot(name, **options):
        told.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    load("someone/drafter", model, revision="v2", token="t", cache_dir="/c", local_files_only=True)
    assert told["name"] == "someone/drafter" and told["revision"] == "v2" and told["token"] == "t"
    assert told["local_files_only"] is True and told["cache_dir"] == "/c"
    with pytest.raises(InvalidInputError, match="no option anything;"):
        load("someone/drafter", model, anything=1)


def test_options_that_a_folder_does_not_have_are_refused(tmp_path):
    model = tiny.target()
    tiny.drafter(model).save_pretrained(tmp_path)
    assert load(tmp_path, model, dtype=torch.bfloat16, token="t", cache_dir="/c", local_files_only=True).bound
    for name in (tmp_path, f"{tmp_path}+lookup", "smollm2-135m-instruct", "smollm2-135m-instruct-dual"):
        for option in ("anything", "revision"):
            with pytest.raises(InvalidInputError, match=f"no option {option};"):
                load(name, model, **{option: "x"})
    with pytest.raises(InvalidInputError, match="no option dtype;"):
        load("smollm2-135m-instruct-dual", model, dtype=torch.float32)
    with pytest.raises(InvalidInputError, match="no revision 'v2'"):
        saving.load(tmp_path, revision="v2")


@pytest.mark.parametrize("name", zoo())
def test_zoo_files(name):
    """What ships: small files, no rows of a target, a card with numbers."""
    folder = saving.Path(__file__).parents[2] / "drafters" / "zoo" / name
    for file in folder.iterdir():
        assert file.stat().st_size <= 15 * 2**20, file.name
    drafter = saving.load(folder)
    assert drafter.draft_ids is None or len(drafter.draft_ids) < drafter.config.vocab_size
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "tau" in card
