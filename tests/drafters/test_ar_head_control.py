"""The autoregressive control learns, and drafts what its teacher-forced states say."""

from __future__ import annotations

import pytest
import tiny
import torch
from ar_head_control import ARHead, ARTrainer

from specdiff.drafters.train.batches import collate, draw_anchors
from specdiff.drafters.train.build import Shape, build
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.loop import TrainConfig

TAPS = (0, 1, 2)


@pytest.fixture
def corpus(fitted_model, tmp_path) -> Corpus:
    tiny.write_greedy_corpus(tmp_path, fitted_model, 24, prompt=6, new=40)
    found = Corpus([str(tmp_path / "greedy.npz")], tmp_path / "features", TAPS, 4, 0.2, fitted_model)
    found.rescan()
    return found


def test_walking_its_own_choices_equals_forcing_them(fitted_model, corpus):
    drafter = build(fitted_model, corpus, Shape(block_size=3, taps=TAPS, vocabulary=0))
    head = ARHead(drafter.model).eval()
    item = corpus.evaluation_items(1)[0]
    batch = collate([item], [draw_anchors(item, 0, None)], 3)
    with torch.no_grad():
        normed, drafted = head.walk(drafter, batch, None)
        again, _ = head.walk(drafter, batch, drafted)
    assert torch.equal(normed, again)
    assert torch.equal(drafter.logits(again).argmax(-1), drafted)


def test_it_learns(fitted_model, corpus, tmp_path):
    """A few texts by heart: the held-out ones are made the trained ones."""
    corpus.train = corpus.held = [pair for pair in corpus.held if pair[0].documents[pair[1]].temperature == 0][:4]
    drafter = build(fitted_model, corpus, Shape(block_size=3, taps=TAPS, vocabulary=0))
    config = TrainConfig(max_steps=60, rows=4, anchors=30, optimizer="adamw", lr=3e-3, mixed_precision="no", average=0)
    trainer = ARTrainer(drafter, corpus, config, tmp_path / "run")
    before = trainer.measure()
    trainer.train()
    after = trainer.measure()
    assert before is not None and after is not None
    assert after.mean > before.mean + 0.5 and after.by_position[0] >= after.by_position[1] >= after.by_position[2]
