"""What a training run tells: speed, time left, the curve, serving with and without loops, how to repeat it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from specdiff.cli import main
from specdiff.cli.train import acceptance, serve
from specdiff.drafters.lookup import PromptLookup
from specdiff.drafters.train import cli as training
from specdiff.drafters.train.corpus import read_shard
from specdiff.drafters.train.report import CURVE_ROWS, command_of, curve, curve_table, served_line
from specdiff.drafters.train.speed import Meter, rates


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder) -> SimpleNamespace:
    """Two runs of the command on one folder, the second with more steps, and what they printed."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["the quick brown fox jumps over the lazy dog again and again until night falls", "one two three", "bye"]
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    (folder / "out.jsonl").write_text(json.dumps({"turns": ["short", words[0]]}) + "\n")
    where = ["--data", str(folder / "p.jsonl"), "--out", str(folder / "run"), "--exclude", str(folder / "out.jsonl")]
    options = "--chats 12 --own-share 0 --new-tokens 16 --rows 2 --anchors 4 --held-out 0.3 --serve-prompts 2"
    options += " --precision no --vocabulary 0 --token hf_secret --evaluate-every 0.00001"
    arguments = ["train", str(tiny_folder), *where, *options.split()]
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "print", lambda *text, **_: told.append(" ".join(map(str, text))), raising=False)
        for steps in ("2", "4"):
            assert main([*arguments, "--max-steps", steps]) == 0
    run = folder / "run"
    return SimpleNamespace(
        run=run, told="\n".join(told), card=(run / "drafter" / "README.md").read_text(),
        result=json.loads((run / "result.json").read_text()), folder=folder,
    )  # fmt: skip


def test_every_stage_tells_its_speed(finished):
    for line in ("answers 192 tokens, ", "tokens/s", "anchors/s"):
        assert line in finished.told
    speed = finished.result["speed"]
    assert speed["generate"]["tokens_per_second"] > 0
    assert speed["train"]["anchors_per_second"] > 0 and speed["train"]["tokens_per_second"] > 0
    assert f"train {speed['train']['anchors_per_second']:.0f} anchors/s" in finished.card
    last = json.loads((finished.run / "log.jsonl").read_text().splitlines()[-1])
    assert last["anchors_per_second"] > 0 and last["tokens_per_second"] > 0


def test_the_curve_is_in_card_and_result(finished):
    points = finished.result["curve"]
    assert [p["step"] for p in points] == [1, 2, 3, 4]
    assert points[-1]["tokens"] == finished.result["state"]["tokens"] and points[-1]["hours"] > points[0]["hours"]
    assert f"| 4 | {points[-1]['tokens']} | {points[-1]['hours']:.3f} | {points[-1]['tau']:.2f} |" in finished.card


def test_the_run_can_be_repeated(finished):
    result, card = finished.result, finished.card
    assert result["recipe"]["max_new_tokens"] == 16 and result["recipe"]["own_share"] == 0
    assert result["chats"] == 12 and result["held_out"] == 0.3 and result["top"] == 32 and result["seed"] == 0
    assert result["data"] == [str(finished.folder / "p.jsonl")] and result["from"] is None
    assert f"--out {finished.run} " in result["command"] and "--max-steps 4" in result["command"]
    assert "hf_secret" not in result["command"] + card
    assert "`specdiff train model --data p.jsonl --out run --exclude out.jsonl --chats 12 " in card
    assert "max_new_tokens 16" in card and "| seed | 0 |" in card
    assert str(finished.folder) not in card, "cards do not tell where a folder lies"


def test_excluded_prompts_are_not_trained_on(finished):
    documents = [d for f in (finished.run / "corpus").glob("*.npz") for d in read_shard(f)]
    counts = finished.result["documents"]
    assert len(documents) == 12 and counts["left_out"] == 4, "one of three prompts"
    assert counts["trained_on"] + counts["held_out"] == 8
    assert finished.result["exclude"] == [str(finished.folder / "out.jsonl")]


def test_both_drafters_are_served_with_and_without_loops(finished):
    served = finished.result["served"]
    assert served.keys() == {"drafter", "prompt lookup"}
    for name, values in served.items():
        assert values["prompts"] == 2 and 0 <= values["loops"] <= 2
        assert (values["without_loops"] is None) == (values["loops"] == 2)
        assert f"| served greedy tau, {name} | {served_line(values)} |" in finished.card
    assert "serve 100%" in finished.told


def test_serving_filters_loops(monkeypatch):
    model = tiny.target()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, tiny.VOCAB, 6).tolist() for _ in range(4)]
    verdicts = iter([True, False, False, True, False, False])
    monkeypatch.setattr("specdiff.bench.loops.is_loop", lambda tokens: next(verdicts))
    both = serve(model, PromptLookup(), iter(prompts), 24)
    straight = serve(model, PromptLookup(), prompts[1:3], 24)
    assert (both["prompts"], both["loops"], straight["loops"]) == (4, 2, 0)
    assert both["without_loops"] == {key: straight[key] for key in ("tau", "by_position", "rounds")}


def test_acceptance_by_hand():
    assert acceptance([[3, 1], [2, 2]]) == {"tau": 2.0, "by_position": [0.75, 0.25], "rounds": 4}
    assert acceptance([]) == {"tau": 0.0, "by_position": [], "rounds": 0}
    line = served_line({"tau": 2.0, "by_position": [0.75], "prompts": 3, "loops": 1, "without_loops": None})
    assert line == "2.00 (accepted through slot 1, 2, ...: 0.75); without the 1 of 3 answers that loop: none left"


def test_what_was_done_twice_counts_once(tmp_path):
    """Evaluations that an interrupted run had logged beyond its checkpoint are not part of the curve."""
    entry = {"tokens": 10, "anchors": 1, "hours": 0.1, "by_position": [0.5], "more": 1}
    steps = [(2, 1.1), (4, 1.2), (6, 1.3), (4, 1.4), (8, 1.5)]
    lines = [json.dumps(entry | {"step": step, "tau": tau}) for step, tau in steps]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert [(p["step"], p["tau"]) for p in curve(tmp_path)] == [(2, 1.1), (4, 1.4), (8, 1.5)]
    assert curve(tmp_path / "nothing") == [] == curve_table([])
    many = [curve(tmp_path)[0] | {"step": step} for step in range(100)]
    table = curve_table(many)
    assert len(table) == 2 + CURVE_ROWS and table[2].startswith("| 0 ") and table[-1].startswith("| 99 ")


def test_speeds_of_several_runs_and_processes(tmp_path):
    for rank, tokens, seconds in ((0, 100, 10.0), (1, 200, 10.0), (0, 100, 10.0), (1, 200, 10.0)):
        line = {"stage": "generate", "rank": rank, "tokens": tokens, "seconds": seconds}
        with (tmp_path / "stages.jsonl").open("a") as record:
            record.write(json.dumps(line) + "\n")
    meter = Meter()
    meter.save(tmp_path, "features")
    assert rates(tmp_path) == {"generate": 30.0}, "two at a time; a stage that did nothing has no speed"
    assert "7 tokens, " in meter.add(7) and meter.tokens == 7
    meter.save(tmp_path, "features")
    assert rates(tmp_path)["features"] > 0 and rates(tmp_path / "nothing") == {}


def test_the_time_left_is_this_runs(monkeypatch, capsys):
    """After a resume, what the earlier run did cost no time here: half a run, then a tenth in a minute."""
    clock = [100.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    display = training.Display()
    for at, done in ((100.0, 0.5), (160.0, 0.6)):
        clock[0] = at
        display("train", done, 1.0, "note")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "train 50%: note" and second == "train 60%, 4 min left: note"
    training.Display(shown=False)("train", 0.5, 1.0, "note")
    assert capsys.readouterr().err == ""


def test_commands_in_cards_and_results():
    words = ["train", "/home/me/a model", "--data", "sub/p.jsonl"]
    assert command_of(words) == "specdiff train '/home/me/a model' --data sub/p.jsonl"
    assert command_of(words, private=True) == "specdiff train 'a model' --data sub/p.jsonl"


# processes ------------------------------------------------------------------------------------------------------------


def test_each_process_takes_its_own_device(monkeypatch):
    """Before the model is loaded; one GPU named for all of them is refused."""
    from specdiff.cli.train import join_processes
    from specdiff.errors import InvalidInputError

    def joined(device: str | None, count: int) -> tuple[bool, Any]:
        team = SimpleNamespace(num_processes=count, device=torch.device("cuda:1"), is_main_process=False)
        monkeypatch.setattr("specdiff.drafters.train.processes.processes", lambda cpu: team)
        args = SimpleNamespace(device=device)
        return join_processes(args), args.device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert joined(None, 2) == (False, "cuda:1") == joined("cuda", 2)
    assert joined("cpu", 2)[1] == "cpu" and joined(None, 1)[1] is None and not current
    assert joined("cuda:1", 1)[1] == "cuda:1" and current == [torch.device("cuda:1")]
    with pytest.raises(InvalidInputError, match="each takes its own GPU"):
        joined("cuda:0", 2)


def test_processes_wait_for_days(monkeypatch):
    from specdiff.drafters.train.processes import processes

    asked: dict[str, Any] = {}
    monkeypatch.setattr("accelerate.PartialState", lambda **options: asked.update(options))
    processes(True)
    assert asked["cpu"] and asked["timeout"].days >= 1


def test_words_of_the_command_line_are_kept(tmp_path: Path):
    args = SimpleNamespace(words=["train", "--token=abc", "x"], token="abc")
    assert training.command_words(args) == ["train", "--token=TOKEN", "x"]
    assert training.command_words(SimpleNamespace(token=None)) == []
