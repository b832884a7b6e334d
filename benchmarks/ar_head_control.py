"""An autoregressive head of equal budget (EAGLE type), as a control for block drafting.

    python benchmarks/ar_head_control.py --data RUN/corpus --features RUN/features --minutes 10 --out runs/ar-head

It starts from the same copied layer and least squares as `specdiff train`, sees the same injected context, documents,
anchors, loss and schedule, and is measured on the same held-out text. The one difference: every drafted token is one
whole pass of the layer over the state that the pass before it gave, so a draft costs K passes instead of one. It can be
trained and measured; it is no drafter that serves. Compare with `specdiff train` on the same data for the same time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specdiff import load_target
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.layers import rms_norm, rotary
from specdiff.drafters.train.batches import Batch, collate, draw_anchors
from specdiff.drafters.train.build import Shape, build
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.evaluate import Acceptance, replay, to_ids
from specdiff.drafters.train.features import Features
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.step import BlockObjective, LossConfig
from specdiff.drafters.train.trainer import Trainer


class ARHead(nn.Module):
    """One layer that drafts token by token.

    Args:
        model: a direct drafter of one layer, freshly built; its parts are taken over.
    """

    def __init__(self, model: DFlashModel) -> None:
        super().__init__()
        self.config = replace(model.config, causal=True, late_mlp=False)
        self.parts = DFlashModel(self.config)
        self.parts.load_state_dict({k: v for k, v in model.state_dict().items() if ".inject." not in k})
        width, taps = self.config.hidden_size, self.config.target_layer_ids
        self.again = nn.Linear(width, width, bias=False)
        last = self.parts.option("state").weight[:, (len(taps) - 1) * width :]
        self.again.weight.data.copy_(last.detach())

    def walk(self, drafter: DFlashDrafter, batch: Batch, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normed states ``[B, A, K, H]`` and greedy target ids ``Long[B, A, K]`` of every slot.

        Args:
            drafter: for embedding and head.
            batch: documents and anchors.
            tokens: ``Long[B, A, K]`` what stands before the slots (teacher forcing), None for the head's own choices.
        """
        parts, config = self.parts, self.config
        features = parts.tap_features(batch.taps.to(parts.fc.weight.dtype))
        positions = torch.arange(features.shape[1])
        ((k, v),) = parts.context(features, positions.expand(features.shape[0], -1))
        visible = (positions < batch.anchors[..., None]) & batch.valid[:, None]
        before = (batch.anchors - 1)[..., None].expand(-1, -1, features.shape[-1])
        state = parts.option("state")(features.gather(1, before))
        token = batch.ids.gather(1, batch.anchors)
        layer, inputs, normed, chosen = parts.stack[0], [], [], []
        for slot in range(config.block_size):
            known = parts.option("token")(rms_norm(drafter.embed(token), config.rms_norm_eps))
            inputs.append((state + known) * config.input_scale)
            x = torch.stack(inputs, 2)
            cos, sin = rotary(batch.anchors[..., None] + torch.arange(slot + 1), config.head_dim, config.rope_theta)
            y = layer.think(layer.attend(x, k, v, visible, cos, sin)[:, :, -1])
            normed.append(parts.norm(y))
            if tokens is None:
                chosen.append(to_ids(drafter, drafter.logits(normed[-1]).argmax(-1)))
            else:
                chosen.append(tokens[..., slot])
            token, state = chosen[-1], self.again(rms_norm(y, config.rms_norm_eps))
        return torch.stack(normed, 2), torch.stack(chosen, 2)


class ARObjective(BlockObjective):
    """The drafters' loss over the head's states."""

    def __init__(self, drafter: DFlashDrafter, head: ARHead, config: LossConfig) -> None:
        super().__init__(drafter, config)
        del self.model
        self.ar = head

    def slots(self, batch: Batch) -> Tensor:
        """See :class:`BlockObjective`."""
        return self.ar.walk(self.drafter, batch, batch.tokens)[0]


class ARTrainer(Trainer):
    """The drafters' loop around the head."""

    def __init__(self, drafter: DFlashDrafter, corpus: Corpus, config: TrainConfig, folder: Path) -> None:
        self.ar = ARHead(drafter.model)
        super().__init__(drafter, corpus, config, folder, self.show)

    def make_objective(self) -> BlockObjective:
        """See :class:`Trainer`."""
        return ARObjective(self.drafter, self.ar, self.config.loss)

    def trained(self) -> nn.Module:
        """See :class:`Trainer`."""
        return self.ar

    def show(self, state: object, info: dict[str, object]) -> None:
        """A line now and then."""
        if self.state.step % 50 == 0:
            print(f"step {self.state.step}, loss {info['loss']:.2f}, done {info['progress']:.0%}", flush=True)

    def measure(self) -> Acceptance | None:
        """Held-out greedy acceptance along replayed rounds."""
        block = self.ar.config.block_size
        reached, anchors, tokens, rounds = torch.zeros(block), 0, 0, 0
        for item in self.items:
            lengths = accepted(self.ar, self.drafter, item)
            reached += (lengths[:, None] > torch.arange(block)).sum(0)
            new, passes = replay(lengths.tolist())
            anchors, tokens, rounds = anchors + len(lengths), tokens + new, rounds + passes
        shares = tuple(float(r) / max(anchors, 1) for r in reached)
        return Acceptance(tokens / max(rounds, 1), shares, rounds)

    def write(self, folder: Path) -> None:
        """Nothing serves this head: only its numbers are kept."""


@torch.no_grad()
def accepted(head: ARHead, drafter: DFlashDrafter, item: Features) -> Tensor:
    """``Long[A]`` accepted length at every anchor of one greedy document."""
    batch = collate([item], [draw_anchors(item, 0, None)], head.config.block_size)
    _, drafted = head.walk(drafter, batch, None)
    right = (drafted == batch.tokens) & batch.present
    return right.long().cumprod(-1).sum(-1)[0]


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="corpus shards: files, folders or patterns")
    parser.add_argument("--features", type=Path, required=True, help="their features, as a training run left them")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--taps", type=lambda text: tuple(map(int, text.split(","))), default=(), help="as the run has")
    args = parser.parse_args()
    model, _ = load_target()
    shape = Shape(block_size=args.block_size, taps=args.taps)
    corpus = Corpus(args.data, args.features, shape.tap_ids(model))
    corpus.rescan()
    loss = LossConfig("decay", 2.5, 0.2)
    config = TrainConfig(
        max_hours=args.minutes / 60, optimizer="adamw", lr=6e-4, average=0.99, evaluate_every=args.minutes, loss=loss
    )
    trainer = ARTrainer(build(model, corpus, shape), corpus, config, args.out)
    print("before training:", trainer.evaluate())
    trainer.train()
    print("after:", (args.out / "log.jsonl").read_text().strip().splitlines()[-1])


if __name__ == "__main__":
    main()
