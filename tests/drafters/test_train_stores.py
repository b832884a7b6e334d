"""Features that find no room on the disk, and several processes that begin from prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import tiny
import torch
from safetensors.torch import load_file

from specdiff.drafters.train import features, pipeline
from specdiff.drafters.train.build import Shape
from specdiff.drafters.train.corpus import Document, read_shard, write_shard
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.trainer import Documents
from specdiff.drafters.train.features import LiveShard, has_room
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.overlap import ngrams
from specdiff.drafters.train.pipeline import Plan, run

TAPS = (0, 2)


def corpus_of(folder: Path, name: str, **options) -> Corpus:
    return Corpus([str(folder / "data")], folder / name, TAPS, 4, 0.2, tiny.target(), **options)


def full(monkeypatch) -> None:
    monkeypatch.setattr(features, "KEPT_FREE", 1 << 62)


def test_room_is_counted(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": features.KEPT_FREE + 1000})
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: usage)
    assert has_room(tmp_path / "not" / "there", 10, 2 * 32, 4) == (10 * (2 * 64 + 6 * 4) <= 1000) is False
    assert has_room(tmp_path, 6, 2 * 32, 4)


def test_what_has_no_room_is_computed_while_training(tmp_path, monkeypatch, caplog):
    """The same batches, a pass of the target for each; nothing is written, and it is said once."""
    model = tiny.target()
    for name in ("a", "b"):
        tiny.write_greedy_corpus(tmp_path / "data" / name, model, 12, new=12 if name == "a" else 15)
        (tmp_path / "data" / name / "greedy.npz").rename(tmp_path / "data" / f"{name}.npz")
    stored = corpus_of(tmp_path, "stored")
    stored.rescan()
    full(monkeypatch)
    live = corpus_of(tmp_path, "live")
    live.rescan()
    assert all(isinstance(shard, LiveShard) for shard in live.shards.values()) and not (tmp_path / "live").exists()
    assert caplog.text.count("no room") == 1
    assert [shard.name for shard in live.shards.values()] == [shard.name for shard in stored.shards.values()]
    passes: list[int] = []
    inner = features.target_pass

    def counted(model, ids, *args):
        passes.append(len(ids))
        return inner(model, ids, *args)

    monkeypatch.setattr(features, "target_pass", counted)
    batches = [list(c.epoch(4, 3, 2, np.random.default_rng(0))) for c in (stored, live)]
    assert len(batches[0]) == len(batches[1]) and passes == [4] * len(batches[1])
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.anchors, other.anchors)
        assert torch.equal(one.target_ids[..., 0], other.target_ids[..., 0])
        torch.testing.assert_close(one.taps, other.taps, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(one.target_probs, other.target_probs, atol=1e-2, rtol=1e-2)
    adopted = corpus_of(tmp_path, "live")
    adopted.adopt(live.found())
    assert adopted.found() == live.found() and len(adopted.train) == len(live.train)


def test_a_run_without_room(tmp_path, monkeypatch):
    """From stored text to a drafter, features in memory only; a later run with room stores them and goes on."""
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path / "data", model, 12, new=16)

    def plan(steps: int) -> Plan:
        config = TrainConfig(
            max_steps=steps, rows=2, anchors=4, optimizer="adamw", mixed_precision="no", evaluate_every=1e9
        )
        shape = Shape(block_size=3, layers=1, taps=TAPS, vocabulary=0, window=2)
        return Plan([str(tmp_path / "data")], tmp_path / "run", shape, config=config, held_out=0.2, top=8)

    with monkeypatch.context() as patch:
        full(patch)
        assert run(model, plan(2)).state.step == 2
    assert not (tmp_path / "run" / "features").exists()
    assert run(model, plan(4)).state.step == 4
    assert len(list((tmp_path / "run" / "features").iterdir())) == 1


def test_documents_with_a_taboo_are_left_out(tmp_path):
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(4, tiny.VOCAB, 30), 3, "test") for _ in range(6)]
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "a.npz", documents)
    taboo = ngrams(documents[2].ids[5:18]) | ngrams(documents[4].ids[17:])
    corpus = corpus_of(tmp_path, "f", taboo=taboo)
    corpus.rescan()
    assert corpus.excluded == 2 and len(corpus.train) + len(corpus.held) == 4
    assert not {2, 4} & {i for _, i in corpus.train + corpus.held}
    names = [shard.name for shard in corpus.shards.values()]
    assert corpus.hold(names) and len(corpus.train) + len(corpus.held) == 4
    dual = Documents([str(tmp_path / "data")], DualConfig(), 0.0, taboo)
    assert dual.excluded == 2 and len(dual.train) == 4


WORKER = """
import sys
from specdiff.drafters.train import pipeline
from specdiff.cli import main
pipeline.SHARD_DOCUMENTS = 4
sys.exit(main(sys.argv[1:]))
"""


def test_two_processes_from_prompts(tmp_path, tiny_folder, monkeypatch):
    """Each writes every other shard, the same ones that one process writes; both train, one of them speaks."""
    from specdiff.cli import main

    (tmp_path / "p.jsonl").write_text('{"prompt": "hello there"}\n{"prompt": "one two three"}\n')
    (tmp_path / "worker.py").write_text(WORKER)
    options = "--chats 12 --own-share 0 --new-tokens 10 --max-steps 2 --rows 2 --anchors 4 --held-out 0.2"
    options += " --serve-prompts 1 --precision no --vocabulary 0 --device cpu"
    arguments = ["train", str(tiny_folder), "--data", str(tmp_path / "p.jsonl"), *options.split(), "--out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(tmp_path / "worker.py"), *arguments, str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("drafter: ") == 1
    lines = [json.loads(line) for line in (tmp_path / "two" / "stages.jsonl").read_text().splitlines()]
    assert sorted(line["rank"] for line in lines if line["stage"] == "generate") == [0, 0, 1]
    state = json.loads((tmp_path / "two" / "result.json").read_text())["state"]
    assert state["step"] == 2 and state["anchors"] == 2 * 2 * 2 * 4
    assert load_file(tmp_path / "two" / "drafter" / "model.safetensors")
    monkeypatch.setattr(pipeline, "SHARD_DOCUMENTS", 4)
    assert main([*arguments, str(tmp_path / "one")]) == 0
    for shard in ("own-00000.npz", "own-00001.npz", "own-00002.npz"):
        one, two = (read_shard(tmp_path / name / "corpus" / shard) for name in ("one", "two"))
        assert [d.ids.tolist() for d in one] == [d.ids.tolist() for d in two]
