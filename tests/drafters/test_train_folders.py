"""Run folders: whose text and features they hold, what a resumed run may change, and what writing may remove."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats.files import read_tensors, write
from specdiff.drafters.train import pipeline
from specdiff.drafters.train.build import Shape, build
from specdiff.drafters.train.corpus import Document, read_shard, write_shard
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.features import open_or_extract
from specdiff.drafters.train.generate import Answer
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.manifest import claim, target_key
from specdiff.drafters.train.regenerate import Recipe, read_prompts
from specdiff.drafters.train.trainer import Trainer
from specdiff.errors import FormatError, InvalidInputError

TAPS = (0, 2)
RECIPE = {"seed": 0, "temperatures": (0.0, 0.7), "max_new_tokens": 16}
PROMPTS = [("hello", "mine"), ("bye", "mine")]


def documents(count: int, seed: int = 0, length: int = 12) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(4, tiny.VOCAB, length + i), 3, "test", 0.0, f"{seed}/{i}") for i in range(count)]


def test_shards_of_the_same_name_have_features_of_their_own(tmp_path):
    model = tiny.target()
    for name, seed in (("one", 0), ("two", 1)):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "own-00000.npz", documents(3, seed))
    corpus = Corpus([str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "f", TAPS, 4, 0.0, model)
    assert corpus.rescan() == 2
    for shard, index in corpus.train:
        item = shard[index]
        wanted = tiny.taps_of(model, torch.from_numpy(item.document.ids)[None], TAPS)[0]
        torch.testing.assert_close(
            torch.from_numpy(np.array(item.taps)).flatten(1).float(), wanted, atol=2e-2, rtol=1e-2
        )
    without = Corpus([str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "f", TAPS, 4, 0.0)
    assert without.rescan() == 2, "found again without a model"


def test_every_document_is_trained_on(tmp_path):
    """The longest ones used to fall out with the last, incomplete batch."""
    model = tiny.target()
    write_shard(tmp_path / "a.npz", documents(15))
    corpus = Corpus([str(tmp_path)], tmp_path / "f", TAPS, 4, 0.0, model)
    corpus.rescan()
    for seed in range(3):
        lengths: set[int] = set()
        for batch in corpus.epoch(8, 4, 2, np.random.default_rng(seed)):
            assert batch.ids.shape[0] == 8
            lengths |= set(batch.valid.sum(1).tolist())
        assert lengths == {12 + i for i in range(15)}


def test_a_folder_belongs_to_one_target_recipe_and_prompts(tmp_path):
    key = target_key(tiny.target())
    assert key == target_key(tiny.target()) != target_key(tiny.target(seed=1))
    claim(tmp_path, key, RECIPE, PROMPTS, False)
    claim(tmp_path, key, RECIPE, PROMPTS, False)
    claim(tmp_path, key, RECIPE, [], False)  # shards only: nothing is generated
    (tmp_path / "corpus").mkdir()
    (tmp_path / "features").mkdir()
    with pytest.raises(InvalidInputError, match=r"another recipe \(max_new_tokens\).*--fresh"):
        claim(tmp_path, key, RECIPE | {"max_new_tokens": 17}, PROMPTS, False)
    with pytest.raises(InvalidInputError, match="another prompts"):
        claim(tmp_path, key, RECIPE, PROMPTS[:1], False)
    with pytest.raises(InvalidInputError, match="another target"):
        claim(tmp_path, "0", RECIPE, PROMPTS, False)
    claim(tmp_path, key, RECIPE, PROMPTS[:1], True)
    assert not (tmp_path / "corpus").exists() and (tmp_path / "features").exists()
    claim(tmp_path, "0", RECIPE, PROMPTS[:1], True)
    assert not (tmp_path / "features").exists()
    claim(tmp_path, "0", RECIPE, PROMPTS[:1], False)


def trainer(folder: Path, corpus: Corpus, block: int = 3, optimizer: str = "adamw") -> Trainer:
    drafter = build(tiny.target(), corpus, Shape(block_size=block, layers=1, taps=TAPS, vocabulary=0))
    config = TrainConfig(max_steps=2, rows=2, anchors=4, optimizer=optimizer, mixed_precision="no")
    return Trainer(drafter, corpus, config, folder)


class Letters:
    """A tokenizer with one id per character and a chat template."""

    chat_template = "x"

    def apply_chat_template(self, chat, **options):
        return "<" + chat[0]["content"] + ">"

    def __call__(self, text, **options):
        return {"input_ids": [ord(c) % tiny.VOCAB for c in text]}


def test_more_chats_go_beside_a_short_last_shard(tmp_path, monkeypatch):
    """Asked for more, a run has as many as were asked for; what was written before stays as it is."""
    monkeypatch.setattr(pipeline, "SHARD_DOCUMENTS", 8)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "bye"}\n')
    calls: list[int] = []

    def generate(prompts, heats, limit, seed):
        calls.append(len(prompts))
        rng = np.random.default_rng(seed)
        yield from (Answer(i, rng.integers(4, tiny.VOCAB, 9).tolist()) for i in range(len(prompts)))

    where = tmp_path / "run" / "corpus"
    before: dict[str, bytes] = {}
    for chats, made in ((11, [8, 3]), (13, [2]), (20, [3, 4]), (20, []), (5, [])):
        plan = pipeline.Plan([str(tmp_path / "p.jsonl")], tmp_path / "run", chats=chats, recipe=Recipe(own_share=0.0))
        calls.clear()
        pipeline.corpus_shards(plan, generate, Letters(), lambda *_: None)
        assert calls == made
        after = {file.name: file.read_bytes() for file in where.iterdir()}
        assert before.items() <= after.items()
        before = after
    texts = [tuple(d.ids) for file in where.iterdir() for d in read_shard(file)]
    assert len(texts) == len(set(texts)) == 20


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    write_shard(tmp_path / "a.npz", documents(8))
    found = Corpus([str(tmp_path / "a.npz")], tmp_path / "f", TAPS, 4, 0.0, tiny.target())
    found.rescan()
    return found


def test_another_shape_or_optimizer_cannot_be_resumed(tmp_path, corpus):
    trainer(tmp_path / "run", corpus).train()
    assert trainer(tmp_path / "run", corpus).resume()
    with pytest.raises(InvalidInputError, match=r"another shape.*--fresh"):
        trainer(tmp_path / "run", corpus, block=4).resume()
    with pytest.raises(InvalidInputError, match="its optimizer is adamw"):
        trainer(tmp_path / "run", corpus, optimizer="muon").resume()


def test_the_best_weights_are_written_before_they_are_recorded(tmp_path, corpus, monkeypatch):
    run = trainer(tmp_path / "run", corpus)
    monkeypatch.setattr(run, "write", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.checkpoint()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_writing_replaces_a_drafter_and_nothing_else(tmp_path):
    other = {"x": torch.ones(2)}
    save_file(other, tmp_path / "dual_adapter.safetensors")
    big = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    write(tmp_path, {"a": 1}, big, max_shard_bytes=20)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    write(tmp_path, {"a": 2}, {"t": torch.zeros(1)})
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "dual_adapter.safetensors",
        "model.safetensors",
    ]
    assert read_tensors(tmp_path).keys() == {"t"}
    assert torch.equal(load_file(tmp_path / "dual_adapter.safetensors")["x"], other["x"])


def test_a_failed_write_leaves_the_old_drafter(tmp_path):
    write(tmp_path, {"a": 1}, {"t": torch.zeros(1)})
    with pytest.raises(TypeError):
        write(tmp_path, {"a": object()}, {"t": torch.ones(1)})
    assert torch.equal(read_tensors(tmp_path)["t"], torch.zeros(1))


def test_a_bound_drafter_is_where_the_targets_head_is():
    model = tiny.target()
    drafter = tiny.drafter(model)
    elsewhere = tiny.target().to("meta")
    moved = DFlashDrafter(drafter.model).bind(elsewhere)
    assert {p.device.type for p in moved.model.parameters()} == {"meta"}


def test_turns_must_be_a_list(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": "hello"}\n')
    with pytest.raises(FormatError, match="list 'turns'"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--max-steps", "-1", "at least 1"),
        ("--max-hours", "nan", "more than 0"),
        ("--rows", "0", "at least 1"),
        ("--anchors", "0", "at least 1"),
        ("--held-out", "1.5", "between 0 and 1"),
    ],
)
def test_sizes_and_budgets_are_checked(option, value, word, tmp_path, capsys):
    from specdiff.cli import main

    with pytest.raises(SystemExit) as end:
        main(["train", "--data", "x.npz", "--out", str(tmp_path), option, value])
    assert end.value.code == 2 and word in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--plain", "--correction", "8"], ["--mask-token-id", "3"]])
def test_options_that_would_change_nothing_are_refused(options, tmp_path, tiny_folder, capsys):
    from specdiff.cli import main

    write_shard(tmp_path / "a.npz", documents(4))
    where = ["--data", str(tmp_path / "a.npz"), "--out", str(tmp_path / "run"), "--max-steps", "1"]
    assert main(["train", str(tiny_folder), *where, *options]) != 0
    assert options[-2] in capsys.readouterr().err


def test_features_are_read_again(tmp_path):
    write_shard(tmp_path / "a.npz", documents(2))
    first = open_or_extract(tiny.target(), tmp_path / "a.npz", tmp_path / "f", TAPS, 4)
    again = open_or_extract(None, tmp_path / "a.npz", tmp_path / "f", TAPS, 4)
    assert np.array_equal(np.array(first[1].taps), np.array(again[1].taps))
    assert len(read_shard(tmp_path / "a.npz")) == 2
