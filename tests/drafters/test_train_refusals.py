"""What ``specdiff train`` refuses by name: options without effect, and runs that would not be what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny

from specdiff.cli import main
from specdiff.drafters.train import pipeline
from specdiff.drafters.train.build import Shape, build, mask_id
from specdiff.drafters.train.corpus import Document, write_shard
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.pipeline import Plan, run
from specdiff.errors import InvalidInputError

QUICK = {"rows": 2, "anchors": 4, "optimizer": "adamw", "average": 0.0, "mixed_precision": "no", "evaluate_every": 1e9}
SHAPE = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=0, window=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chats", "2000"], ["--chats", ".jsonl"]),
        (["--own-share", "0.5", "--quote-share", "0"], ["--own-share, --quote-share", ".jsonl"]),
        (["--new-tokens", "320"], ["--new-tokens"]),
        (["--prompt-tokens", "512"], ["--prompt-tokens"]),
        (["--kind", "dual", "--chats", "10"], ["--chats"]),
        (["--gamma", "2.5", "--weighting", "dpace"], ["--gamma", "--weighting dpace"]),
        (["--kind", "dual", "--distance", "tv"], ["--distance", "--kind dflash"]),
    ],
)
def test_options_without_effect(options, words, tmp_path, capsys, monkeypatch):
    """Also where the value is the default; before the target is loaded."""
    monkeypatch.setattr("specdiff.cli.train.load_model", lambda args: pytest.fail("loaded a model first"))
    assert main(["train", "--data", "x.npz", "--out", str(tmp_path), "--max-steps", "1", *options]) != 0
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_a_training_belongs_to_what_it_began_from(tmp_path):
    """Another --from on a folder with a checkpoint: the checkpoint would win, so it is refused; --fresh begins anew."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path / "data", model, 8, new=16)
    corpus = Corpus([str(tmp_path / "data")], tmp_path / "f", (0, 2), 8, 0.0, model)
    corpus.rescan()

    def plan(seed: int | None, resume: bool = True) -> Plan:
        start = build(model, corpus, SHAPE, seed) if seed is not None else None
        if start is not None:
            start.model.fc.weight.data += seed
        config = TrainConfig(max_steps=1, **QUICK)
        data, folder = [str(tmp_path / "data")], tmp_path / "run"
        return Plan(data, folder, SHAPE, start, config, top=8, served_prompts=0, resume=resume)

    run(model, plan(1))
    run(model, plan(1))
    for other in (2, None):
        with pytest.raises(InvalidInputError, match=r"another --from.*--fresh"):
            run(model, plan(other))
    run(model, plan(2, resume=False))
    run(model, plan(2))
    (tmp_path / "run" / "data.json").write_text("{}")  # as older runs left it: says nothing
    run(model, plan(1))


def test_an_abandoned_fresh_run_does_not_bring_the_old_one_back(tmp_path, monkeypatch):
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path / "data", model, 8, new=16)
    plan = Plan(
        [str(tmp_path / "data")], tmp_path / "run", SHAPE, config=TrainConfig(max_steps=1, **QUICK), top=8,
        served_prompts=0,
    )  # fmt: skip
    run(model, plan)
    plan.resume = False
    monkeypatch.setattr(pipeline, "build", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(model, plan)
    assert not (tmp_path / "run" / "checkpoint").exists()


def every_id(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    texts = [rng.permutation(tiny.VOCAB) for _ in range(6)]
    write_shard(folder / "all.npz", [Document(ids.astype(np.int64), 3, "test") for ids in texts])
    return folder / "all.npz"


def test_no_id_is_free_for_the_mask(tmp_path):
    """Used to be id 0, which the text may hold. Told before the target reads anything."""
    plain = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=0, plain=True)
    data = every_id(tmp_path)
    plan = Plan([str(data)], tmp_path / "run", plain, config=TrainConfig(max_steps=1, **QUICK), held_out=0.0, top=8)
    with pytest.raises(InvalidInputError, match="--mask-token-id"):
        run(tiny.target(), plan)
    assert not list((tmp_path / "run").glob("features/*"))
    few = [Document(np.array([1, 2, tiny.VOCAB - 1]), 1)]
    assert mask_id(plain, few, tiny.VOCAB) == tiny.VOCAB - 2
    assert mask_id(Shape(plain=True, mask_token_id=7), few, tiny.VOCAB) == 7


def test_taps_without_the_state_that_enters_the_copied_layers():
    model = tiny.target()
    with pytest.raises(InvalidInputError, match="put 2 among the taps"):
        Shape(layers=1, taps=(0, 1)).tap_ids(model)
    for shape in (Shape(layers=1, taps=(0, 1), init="random"), Shape(taps=(0, 1), plain=True)):
        assert shape.tap_ids(model) == (0, 1)
    with pytest.raises(InvalidInputError, match="needs a target of more"):
        Shape(layers=4).tap_ids(model)
