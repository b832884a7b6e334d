"""Other runners as arms: those that can be had here run for real, the packages that cannot have stand-ins."""

from __future__ import annotations

import io
import json
import sys
import textwrap

import pytest
import torch
from bench_tiny import StubTokenizer, tiny_llama
from rich.console import Console
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from specdiff import SpecDiff
from specdiff.bench.arms import specdiff_arm
from specdiff.bench.peers import DFLASH, HF_DFLASH, LLAMA, LLAMA_LOOKUP, PEERS, PeerFiles, peer_arms
from specdiff.bench.prompts import Prompt
from specdiff.bench.run import BenchOptions, run_bench
from specdiff.cli import main
from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.formats.export import export
from specdiff.report.terminal import print_report
from specdiff.testing import RandomDrafter

IDS = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture
def drafter_folder(tmp_path):
    """A random drafter that transformers decodes with."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, block_size=4, mask_token_id=2, target_layer_ids=[0, 1], bos_token_id=None, eos_token_id=None,
        pad_token_id=0, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(1)
    MuseGlimmerAssistantModel(config).save_pretrained(tmp_path / "muse")
    return tmp_path / "muse"


@pytest.fixture
def dflash_folder(tmp_path, monkeypatch):
    """A package called dflash that proposes nothing but calls the target as the real one does, and a drafter for it."""
    package = tmp_path / "site" / "dflash"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(
        textwrap.dedent(
            """
            import torch

            class DFlashDraftModel(torch.nn.Module):
                @classmethod
                def from_pretrained(cls, folder, dtype=None):
                    return cls()

            def dflash_generate(model, target, ids, count, stop_token_ids, temperature=0.0):
                assert target.config.vocab_size and target.device.type == "cpu"
                for _ in range(count):
                    token = target(ids).logits[:, -1].argmax(-1, keepdim=True)
                    ids = torch.cat([ids, token], 1)
                    if stop_token_ids and int(token) in stop_token_ids:
                        break
                return ids
            """
        )
    )
    monkeypatch.syspath_prepend(str(package.parent))
    folder = tmp_path / "zlab"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    yield folder
    for name in ("dflash", "dflash.model"):
        sys.modules.pop(name, None)


def plain(model, tokens):
    out = model.generate(IDS[None], attention_mask=torch.ones(1, 5).long(), max_new_tokens=tokens, do_sample=False)
    return out[0, 5:].tolist()


def test_every_peer_that_cannot_run_says_why(tmp_path):
    model = tiny_llama()
    arms, refused = peer_arms(model, 0.0, 1, PeerFiles())
    assert not arms and set(refused) == set(PEERS)
    assert "--peer-drafter" in refused[HF_DFLASH] and "--peer-dflash" in refused[DFLASH]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    arms, refused = peer_arms(model, 0.0, 1, PeerFiles(*[str(tmp_path)] * 3))
    assert not arms
    assert "does not load" in refused[HF_DFLASH] and "reads" not in refused[HF_DFLASH]
    assert "pip install" in refused[DFLASH] and "pip install" in refused[LLAMA] and LLAMA_LOOKUP in refused
    _, refused = peer_arms(model, 0.0, 1, PeerFiles(drafter="nowhere"))
    assert "does not exist" in refused[HF_DFLASH]
    _, refused = peer_arms(model, 0.0, 4, PeerFiles(str(tmp_path)))
    assert set(refused.values()) == {"takes one prompt at a time"}


def test_a_model_that_is_no_drafter_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    _, refused = peer_arms(tiny_llama(), 0.0, 1, PeerFiles(str(tmp_path)))
    assert "DFlash drafter" in refused[HF_DFLASH]


def test_transformers_own_dflash_decoding(drafter_folder):
    model = tiny_llama(vocab=30)
    arms, _ = peer_arms(model, 0.0, 1, PeerFiles(str(drafter_folder)))
    run = arms[HF_DFLASH]([IDS], 12, 0)
    assert run.tokens == [plain(model, 12)]
    assert run.prefill > 0 and run.decode > 0 and 1 <= run.passes <= 11 and run.first >= 1
    assert run.decoded >= run.passes


def test_transformers_takes_our_export(tmp_path):
    """A plain drafter through ``specdiff export --to muse``: accepted as often there as here."""
    model = tiny_llama(vocab=30)
    config = DFlashConfig(
        hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=30,
        num_target_layers=2, target_layer_ids=(0,), block_size=3, mask_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    drafter = DFlashDrafter(DFlashModel(config).eval()).bind(model)
    export(drafter, tmp_path / "out", "muse", target=model)
    arms, refused = peer_arms(model, 0.0, 1, PeerFiles(str(tmp_path / "out")))
    assert HF_DFLASH in arms, refused
    run = arms[HF_DFLASH]([IDS], 24, 0)
    ours = specdiff_arm(SpecDiff(model, drafter, fast="off"), 0.0)([IDS], 24, 0)
    assert run.tokens == ours.tokens == [plain(model, 24)]
    assert abs(run.passes - ours.passes) <= 1


def test_the_dflash_package_and_its_end_token(dflash_folder):
    model = tiny_llama(vocab=30)
    text = plain(model, 12)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    arms, _ = peer_arms(model, 0.0, 1, PeerFiles(dflash=str(dflash_folder)))
    run = arms[DFLASH]([IDS], 12, 0)
    assert run.tokens == [text] and run.passes == 11 and run.first == 1
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    model.generation_config.eos_token_id = text[4]
    arms, _ = peer_arms(model, 0.0, 1, PeerFiles(dflash=str(dflash_folder)))
    assert arms[DFLASH]([IDS], 12, 0).tokens == [text[: text.index(text[4]) + 1]]
    (dflash_folder / "config.json").write_text('{"specdiff": {}}')
    _, refused = peer_arms(model, 0.0, 1, PeerFiles(dflash=str(dflash_folder)))
    assert "options of specdiff" in refused[DFLASH]


def test_the_report_compares_and_names_them(drafter_folder, dflash_folder):
    model = tiny_llama(vocab=30)
    prompts = [Prompt("a", "one", "hello there"), Prompt("b", "one", "good morning")]
    files = PeerFiles(str(drafter_folder), str(dflash_folder))
    options = BenchOptions(max_new_tokens=8, context=16, cost_seconds=0.0, peers=files)
    report = run_bench(SpecDiff(model, RandomDrafter(30, 3)), StubTokenizer(30), prompts, options)
    assert {HF_DFLASH, DFLASH} <= set(report["mode"]["arms"])
    assert report["mode"]["ratios"]["dflash"]["count"] == report["mode"]["ratios"]["hf_dflash"]["count"] == 2
    assert sum("llama.cpp" in note and "left out" in note for note in report["notes"]) == 2
    found = report["roofline"]
    assert found["weight_bytes"] > 0 and found["share"] == pytest.approx(found["floor_seconds"] / found["pass_seconds"])
    console = Console(width=200, file=io.StringIO())
    print_report(json.loads(json.dumps(report)), console)
    shown = console.file.getvalue()
    spent = report["mode"]["drafting"]
    assert 0 < spent["accept_seconds_per_round"] < spent["seconds_per_round"]["verify"]
    assert "A round of specdiff takes" in shown and "target pass" in shown
    assert "specdiff over transformers' DFlash decoding" in shown and "GB/s" in shown


def test_files_of_peers_without_peers_are_a_mistake(capsys):
    assert main(["bench", "--peer-gguf", "x.gguf"]) != 0
    assert "--peers" in capsys.readouterr().err
