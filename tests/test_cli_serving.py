"""``specdiff export`` and ``specdiff serve``, through the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdiff.cli import main
from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.formats.files import tensor_names


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny target, a plain drafter and one with everything on disk."""
    root = tmp_path_factory.mktemp("serving")
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
    target.save_pretrained(root / "target")
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(root / "target")
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 64, "num_target_layers": 4, "target_layer_ids": (0, 2), "block_size": 4, "mask_token_id": 3,
    }  # fmt: skip
    DFlashDrafter(DFlashModel(DFlashConfig(**shape))).save_pretrained(root / "plain")
    DFlashDrafter(DFlashModel(DFlashConfig(**shape)), torch.arange(9)).save_pretrained(root / "pruned")
    direct = DFlashConfig(**(shape | {"direct": True, "late_mlp": True, "mask_token_id": None}))
    DFlashDrafter(DFlashModel(direct)).save_pretrained(root / "direct")
    return {path.name: path for path in root.iterdir()}


def shown(capsys, *arguments: str) -> list[list[str]]:
    assert main(["serve", "--print", *arguments]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("layout", "target"), [("zlab", False), ("muse", True), ("speculators", True)])
def test_export_then_serve(folders, tmp_path, capsys, layout, target):
    extra = ["--target", str(folders["target"])] if target else []
    assert main(["export", str(folders["plain"]), "--to", layout, str(tmp_path), *extra]) == 0
    assert "4 drafted tokens" in capsys.readouterr().out
    (command,) = shown(capsys, str(tmp_path), "--engine", "vllm", "--target", str(folders["target"]))
    assert command[:3] == ["vllm", "serve", str(folders["target"])]
    speculation = json.loads(command[command.index("--speculative-config") + 1])
    assert speculation == {"method": "dflash", "model": str(tmp_path.resolve()), "num_speculative_tokens": 4}


def test_sglang_counts_the_anchor(folders, capsys):
    (command,) = shown(capsys, str(folders["plain"]), "--engine", "sglang", "--target", "some/model", "--port", "9")
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "some/model"]
    told = dict(zip(command[3::2], command[4::2], strict=True))
    assert told["--speculative-algorithm"] == "DFLASH" and told["--speculative-num-draft-tokens"] == "5"
    assert told["--speculative-draft-model-path"] == str(folders["plain"].resolve()) and told["--port"] == "9"


def test_llamacpp_wants_its_own_files_first(folders, capsys):
    plain = str(folders["plain"])
    steps = shown(capsys, plain, "--engine", "llamacpp", "--target", "t", "--block-size", "3", "--extra", "-fa on")
    assert [step[0] for step in steps] == ["python", "python", "llama-server"]
    assert "--target-model-dir" in steps[1]
    assert steps[2][steps[2].index("--spec-draft-n-max") + 1] == "3" and steps[2][-2:] == ["-fa", "on"]
    assert main(["serve", str(folders["plain"]), "--engine", "llamacpp", "--target", "t"]) == 3
    assert "--print" in capsys.readouterr().err


def test_without_print_the_engine_runs(folders, tmp_path):
    """A stand-in called vllm gets exactly what --print shows."""
    fake = tmp_path / "vllm"
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n")
    fake.chmod(0o755)
    command = [sys.executable, "-m", "specdiff", "serve", str(folders["plain"]), "--engine", "vllm", "--target", "t"]
    path = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("['serve', 't', '--speculative-config', ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["export", "pruned", "--to", "zlab", "OUT"], 3, "--without pruned-vocabulary"),
        (["export", "direct", "--to", "zlab", "OUT", "--without", "direct-path"], 2, "mask_token_id"),
        (["export", "plain", "--to", "zlab", "OUT", "--without", "speed"], 2, "unknown feature"),
        (["export", "plain", "--to", "gguf", "OUT"], 2, ""),
        (["export", "plain", "--to", "zlab", "plain"], 2, "not empty"),
        (["export", "plain", "--to", "zlab", "OUT", "--device", "cpu", "--trust-remote-code"], 2, "--target"),
        (["export", "plain", "--to", "muse", "OUT", "--transformers", "5.21"], 2, "5.21"),
        (["export", "plain", "--to", "dspark", "OUT"], 3, "cannot hold"),
        (["export", "lookup", "--to", "zlab", "OUT"], 2, "no weights"),
        (["export", "nothing", "--to", "zlab", "OUT"], 3, "not in the zoo"),
        (["export", "pruned", "--to", "speculators", "OUT"], 2, "target"),
        (["serve", "direct", "--engine", "vllm", "--target", "t", "--print"], 3, "specdiff export"),
        (["serve", "pruned", "--engine", "vllm", "--target", "t", "--print"], 3, "specdiff export"),
        (["serve", "plain", "--engine", "vllm", "--target", "t", "--print", "--block-size", "9"], 2, "at most 4"),
        (["serve", "plain", "--engine", "mlx", "--print"], 2, ""),
        (["serve", "target", "--engine", "vllm", "--target", "t", "--print"], 3, "LlamaForCausalLM"),
    ],
)
def test_exit_codes(folders, tmp_path, capsys, arguments, code, words):
    filled = [str(folders[a]) if a in folders else a.replace("OUT", str(tmp_path / "out")) for a in arguments]
    try:
        got = main(filled)
    except SystemExit as end:
        got = int(end.code or 0)
    assert got == code and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing half-written"


def test_left_out_when_asked(folders, tmp_path):
    arguments = ["export", str(folders["pruned"]), "--to", "zlab", str(tmp_path), "--weights", "bfloat16"]
    assert main([*arguments, "--without", "pruned-vocabulary"]) == 0
    loaded = DFlashDrafter.from_pretrained(tmp_path, dtype=None)
    assert loaded.draft_ids is None and loaded.model.fc.weight.dtype == torch.bfloat16
    first = DFlashDrafter.from_pretrained(folders["pruned"])
    assert torch.equal(loaded.model.norm.weight.float(), first.model.norm.weight)


class Hub:
    """Stands for huggingface_hub: repositories are folders of which only the configuration is downloaded."""

    def __init__(self, monkeypatch, cache: Path, source: Path, error: Exception | None = None) -> None:
        self.asked, self.cache, self.source, self.error = 0, cache, source, error
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", self.metadata)

    def download(self, repository: str, name: str) -> str:
        assert repository == "some/drafter"
        return str(shutil.copy(self.source / name, self.cache / name))

    def metadata(self, repository: str) -> SimpleNamespace:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(weight_map=dict.fromkeys(tensor_names(self.source), "model.safetensors"))


SERVE_HUB = ["serve", "some/drafter", "--engine", "vllm", "--target", "t", "--print"]


@pytest.mark.parametrize(("name", "code"), [("plain", 0), ("pruned", 3)])
def test_tensors_of_a_repository_are_looked_at(folders, tmp_path, monkeypatch, capsys, caplog, name, code):
    hub = Hub(monkeypatch, tmp_path, folders[name])
    assert main(SERVE_HUB) == code and hub.asked == 1
    assert ("specdiff export" in capsys.readouterr().err) == (code == 3)
    assert not caplog.records
    shutil.copy(folders[name] / "model.safetensors", tmp_path)
    assert main(SERVE_HUB) == code and hub.asked == 1, "the hub's cache has them"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (huggingface_hub.errors.OfflineModeIsEnabled("offline mode"), "offline mode"),
        (huggingface_hub.errors.NotASafetensorsRepoError("none"), "no safetensors"),
    ],
)
def test_serve_says_what_it_could_not_look_at(folders, tmp_path, monkeypatch, caplog, error, words):
    Hub(monkeypatch, tmp_path, folders["pruned"], error)
    assert main(SERVE_HUB) == 0
    assert "not checked" in caplog.text and words in caplog.text
    caplog.clear()
    assert main(["serve", str(tmp_path), *SERVE_HUB[2:]]) == 0, "a folder with the configuration alone"
    assert "not checked" in caplog.text
