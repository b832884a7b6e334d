"""The losses of drafter training, by hand and against dense computations."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdiff.drafters.train.batches import Batch, collate, draw_anchors
from specdiff.drafters.train.build import Shape, build
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.losses import dpace_weights, total_variation
from specdiff.drafters.train.step import BlockObjective, LossConfig
from specdiff.drafters.train.trainer import Trainer

SHAPE = Shape(block_size=3, layers=1, taps=(0, 2), vocabulary=30, window=2)


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    model = tiny.target()
    tiny.write_greedy_corpus(tmp_path, model, 12, new=24)
    found = Corpus([str(tmp_path)], tmp_path / "features", (0, 2), top=8, share=0.2, model=model)
    found.rescan()
    return found


def objective_and_batch(corpus: Corpus, **loss) -> tuple[BlockObjective, Batch]:
    drafter = build(corpus.model, corpus, SHAPE)
    items = [s[i] for s, i in corpus.train[:4]]
    rng = np.random.default_rng(0)
    batch = collate(items, [draw_anchors(i, 10, rng) for i in items], 3)
    return BlockObjective(drafter, LossConfig(**loss)), batch


def test_total_variation_by_hand():
    """.5 (|.6 - .5| + |.1 - .2| + |.3 - .3|); then the second token cannot be drafted: .5 (.1 + .1 + |.3 - .5|)."""
    drafted, law = torch.tensor([[0.5, 0.2]] * 2), torch.tensor([[0.6, 0.1]] * 2)
    distance, _, _ = total_variation(drafted, law, torch.tensor([[True, True], [True, False]]))
    torch.testing.assert_close(distance, torch.tensor([0.1, 0.2]))
    whole, _, _ = total_variation(torch.tensor([[1.0]]), torch.tensor([[0.25]]), torch.tensor([[True]]))
    assert float(whole) == pytest.approx(0.75), "the rest is a bin: half of .75 here, half there"


def dense(objective: BlockObjective, batch: Batch) -> torch.Tensor:
    """``Float[B, A, K, V]`` log-probabilities, by autograd."""
    return (objective.slots(batch) @ objective.head.T).log_softmax(-1)


def gradient(objective: BlockObjective, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    weight = objective.drafter.model.fc.weight
    found = weight.grad.clone()
    weight.grad = None
    return found


def test_variation_matches_autograd(corpus):
    objective, batch = objective_and_batch(corpus, gamma=2.0, hard=0.3, distance="tv")
    loss, _ = objective(batch)
    got = gradient(objective, loss)
    logq = dense(objective, batch)
    columns = objective.columns[batch.target_ids]
    known = columns >= 0
    picked = logq.gather(-1, columns.clamp(min=0))
    q, p = picked.exp() * known, batch.target_probs
    distance = 0.5 * ((p - q).abs().sum(-1) + ((1 - q.sum(-1)) - (1 - p.sum(-1)).clamp(min=0)).abs())
    each = 0.7 * distance - 0.3 * picked[..., 0] * (known[..., 0] & batch.present)
    want = (each * torch.exp(-torch.arange(3) / 2.0) * batch.present).sum() / batch.anchors.numel()
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, gradient(objective, want), atol=1e-5, rtol=1e-4)


class Heads(TorchDispatchMode):
    """Counts matrix products that are as wide as the head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.count = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == self.width:
            self.count += 1
        return out


def test_dpace_weights_come_with_the_loss(corpus):
    """The same loss and gradient as a dense computation, and the head's logits are computed once."""
    objective, batch = objective_and_batch(corpus, weighting="dpace", hard=0.3)
    with Heads(SHAPE.vocabulary) as heads:
        loss, _ = objective(batch)
    assert heads.count == 1
    got = gradient(objective, loss)
    logq = dense(objective, batch)
    columns = objective.columns[batch.target_ids]
    known = columns >= 0
    picked = logq.gather(-1, columns.clamp(min=0))
    soft = 0.7 * batch.target_probs * known
    soft[..., 0] += 0.3 * (known[..., 0] & batch.present)
    weights = dpace_weights(picked[..., 0].exp() * known[..., 0]) * batch.present
    want = -((soft * picked).sum(-1) * weights).sum() / batch.anchors.numel()
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, gradient(objective, want), atol=1e-5, rtol=1e-4)


def test_a_run_with_total_variation_learns(tmp_path, corpus):
    seen: list[float] = []
    config = TrainConfig(
        max_steps=60, rows=4, anchors=12, lr=3e-3, optimizer="adamw", average=0.0, mixed_precision="no",
        evaluate_every=1e9, loss=LossConfig(gamma=2.0, hard=0.0, distance="tv"),
    )  # fmt: skip
    trainer = Trainer(
        build(corpus.model, corpus, SHAPE), corpus, config, tmp_path / "run", lambda _, info: seen.append(info["loss"])
    )
    trainer.train()
    assert all(0 <= value < 3 for value in seen), "a distance is at most 1 a slot"
    assert sum(seen[-5:]) < 0.8 * sum(seen[:5])
