"""``specdiff diffuse``."""

from __future__ import annotations

import io
import json

import pytest
import torch
from native_tiny import MASK, PAD, tiny_llama
from rich.console import Console
from test_native_checkpoints import llada2_checkpoint, tokenizer_files

from specdiff import DiffusionLM
from specdiff.cli import codes, main
from specdiff.cli.canvas import LiveCanvas
from specdiff.cli.diffuse import gaps
from specdiff.diffusion.dual import DualAdapter, dual_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("diffuse") / "m"
    llada2_checkpoint(path)
    tokenizer_files(path)
    return str(path)


def test_writes_and_reports(folder, capsys):
    assert (
        main(
            [
                "diffuse",
                "w1 w2 w3",
                "--model",
                folder,
                "--raw",
                "--max-new-tokens",
                "9",
                "--json",
                "--option",
                "threshold=0.2",
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["nfe"][0] >= 1 and 0 < len(record["token_ids"]) <= 9
    lm = DiffusionLM.from_pretrained(folder)
    want = lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, threshold=0.2)[0, 3:].tolist()
    assert record["token_ids"] == want[: len(record["token_ids"])]
    assert main(["diffuse", "w1 w2", "--model", folder, "--raw", "--max-new-tokens", "4", "--stats"]) == 0
    shown = capsys.readouterr()
    assert "passes" in shown.err and shown.out.strip()


def test_infills_gaps_and_leaves_the_rest(folder, capsys):
    text = "w1 w2 [...] w5"
    assert main(["diffuse", text, "--infill", "--gap-tokens", "2", "--model", folder, "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["token_ids"]
    assert ids[:2] == [1, 2] and ids[4:] == [5] and len(ids) == 5 and MASK not in ids


def test_gaps_keep_special_tokens_around_and_the_text_as_given(folder, capsys, monkeypatch):
    from test_native_generate import bert_like_tokenizer

    load = DiffusionLM.from_pretrained.__func__
    lm = load(DiffusionLM, folder, tokenizer=bert_like_tokenizer(), forbidden_ids=(35, 36, 37, 38, 39), eos_ids=())
    ids, hole, _ = gaps(lm, "w1 [...] w2", 2)
    assert ids[0].tolist() == [36, 1, MASK, MASK, 2, 37] and hole[0].tolist() == [False] * 2 + [True] * 2 + [False] * 2
    monkeypatch.setattr(DiffusionLM, "from_pretrained", lambda *a, **k: lm)
    assert main(["diffuse", "<k>  w1 [...]\tw5", "--infill", "--gap-tokens", "1", "--model", folder, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text.startswith("<k>  w1 w") and text.endswith("\tw5")


def test_b58_the_spelling_of_the_mask_in_a_prompt_is_text(folder):
    lm = DiffusionLM.from_pretrained(folder)
    ids, hole, _ = gaps(lm, "w1 <|mask|> [...] w2", 2)
    assert ids[0, 1] == MASK and hole[0].tolist() == [False, False, True, True, False]
    out = lm.infill(ids, hole)
    assert int(out[0, 1]) == MASK and not (out[0, 2:4] == MASK).any()


def test_a_dual_mode_adapter_with_its_base(tmp_path, capsys):
    base = tiny_llama(0)
    base.save_pretrained(tmp_path / "base")
    tokenizer_files(tmp_path / "base")
    DualAdapter(base, MASK, rank=2).save(tmp_path / "dual", dual_spec(MASK, 4, pad_id=PAD))
    call = ["diffuse", "w1 w2 w3", "--raw", "--target", str(tmp_path / "base"), "--adapter", str(tmp_path / "dual")]
    assert main([*call, "--max-new-tokens", "6", "--json", "--dtype", "float32"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 6


@pytest.mark.parametrize(
    "arguments,code,words",
    [
        (["diffuse", " "], codes.USAGE, "empty"),
        (["diffuse", "a", "--infill", "--model", "x"], codes.USAGE, "gap"),
        (["diffuse", "a", "--model", "x", "--adapter", "y"], codes.USAGE, "--adapter"),
        (["diffuse", "a", "--model", "x", "--target", "y"], codes.USAGE, "--target"),
        (["diffuse", "a", "--model", "x", "--trust-remote-code"], codes.USAGE, "--trust-remote-code"),
        (["diffuse", "a", "--preset", "llada"], codes.USAGE, "--preset is for --model"),
        (["diffuse", "a [...]", "--infill", "--max-new-tokens", "9", "--model", "x"], codes.USAGE, "--max-new-tokens"),
        (["diffuse", "a [...]", "--infill", "--raw", "--model", "x"], codes.USAGE, "--raw is for texts"),
        (["diffuse", "a", "--gap-tokens", "8", "--model", "x"], codes.USAGE, "--gap-tokens is for gaps"),
        (["diffuse", "a", "--delay", "1", "--json", "--model", "x"], codes.USAGE, "--delay"),
        (["diffuse", "a", "--revision", "v2"], codes.USAGE, "revision"),
        (["diffuse", "a", "--device", "nowhere", "--model", "x"], codes.USAGE, "--device"),
    ],
)
def test_wrong_usage_says_what_is_wrong(arguments, code, words, capsys, monkeypatch):
    for name in ("from_pretrained", "from_adapter"):
        monkeypatch.setattr(DiffusionLM, name, lambda *a, **k: pytest.fail("something was loaded"))
    assert main(arguments) == code
    assert words in capsys.readouterr().err


def test_threads_are_those_asked_for(folder, capsys, monkeypatch):
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    call = ["diffuse", "w1 w2", "--model", folder, "--raw", "--max-new-tokens", "2", "--threads", "3"]
    assert main(call) == 0 and told == [3]


def test_wrong_policy_options_are_usage_errors(folder, capsys):
    assert main(["diffuse", "w1", "--model", folder, "--raw", "--option", "treshold=1"]) == codes.USAGE
    assert "treshold" in capsys.readouterr().err
    assert main(["diffuse", "w1", "--model", folder, "--raw", "--option", "threshold"]) == codes.USAGE


@pytest.mark.parametrize(
    "option,words", [("temperature=0.5", "--temperature"), ("streamer=1", "Python"), ("mask=1", "Python")]
)
def test_arguments_of_the_call_are_no_policy_options(folder, capsys, option, words):
    assert main(["diffuse", "w1", "--model", folder, "--raw", "--option", option]) == codes.USAGE
    shown = capsys.readouterr().err
    assert "--option" in shown and words in shown


def test_a_gap_whose_block_ends_before_the_text_asks_for_stretch(folder, capsys):
    text = "w1 [...] " + " ".join(["w2"] * 40)
    call = ["diffuse", text, "--infill", "--gap-tokens", "1", "--model", folder, "--json"]
    assert main(call) != codes.OK
    assert "--stretch" in capsys.readouterr().err
    assert main([*call, "--stretch"]) == codes.OK
    assert json.loads(capsys.readouterr().out)["token_ids"][2:] == [2] * 40
    assert main(["diffuse", "w1", "--model", folder, "--stretch"]) == codes.USAGE
    assert "--infill" in capsys.readouterr().err


def test_the_live_canvas_shows_masks_and_drafts(folder):
    lm = DiffusionLM.from_pretrained(folder)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    canvas = LiveCanvas(lm.tokenizer, console=console)
    out = lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, streamer=canvas, eos_token_id=())
    shown = console.file.getvalue()
    assert "·" in shown and canvas.frames >= 2
    assert canvas.settled == out[0, 3:].tolist()
    # the text before a gap is shown from the first frame, and counted once
    for gap in (0, 2):
        ids, hole = torch.tensor([[1, 2, 3, 4, 5]]), torch.zeros(1, 5, dtype=torch.bool)
        hole[0, gap : gap + 2] = True
        canvas = LiveCanvas(lm.tokenizer, console=console, before=ids[0, :gap].tolist())
        out = lm.infill(ids, hole, streamer=canvas)
        assert canvas.settled == out[0].tolist()


def test_block_size_is_for_texts_that_go_on(folder, capsys):
    assert main(["diffuse", "w1 [...]", "--infill", "--block-size", "2", "--model", folder]) == codes.USAGE
    assert "--block-size is for texts" in capsys.readouterr().err
    assert main(["diffuse", "w1 w2", "--raw", "--block-size", "2", "--model", folder]) != 0
    assert "trained with" in capsys.readouterr().err
