"""Held-out acceptance, teacher-forced on the target's own greedy text: what greedy serving will accept, without
serving.

On greedy text the document *is* the target's answer to every prefix, so drafting at each anchor and comparing with the
document gives the exact accepted length there, and following the accepted lengths from the first anchor replays the
very rounds that serving would run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.batches import collate, draw_anchors
from specdiff.drafters.train.features import Features


@dataclass(frozen=True)
class Acceptance:
    """Measured on N documents.

    Attributes:
        tau: new tokens per target pass along the replayed rounds, the first token not counted.
        by_position: share of anchors whose block was accepted through slot 1, 2, ..., K (all anchors, unconditional).
        rounds: replayed rounds.
    """

    tau: float
    by_position: tuple[float, ...]
    rounds: int

    @property
    def mean(self) -> float:
        """1 + mean accepted length over all anchors."""
        return 1.0 + sum(self.by_position)

    @property
    def numbers(self) -> dict[str, Any]:
        """What the run's log keeps."""
        return {"tau": self.tau, "by_position": self.by_position, "mean": self.mean}


@torch.no_grad()
def greedy_block(drafter: DFlashDrafter, states: Tensor) -> Tensor:
    """Greedy tokens ``Long[..., K]`` of parallel states ``[..., K, H]``, left to right with the sequential head.

    Args:
        drafter: bound.
        states: of :meth:`DFlashDrafter.states`.
    """
    slots = states.shape[-2]
    if not drafter.config.sequential:
        return to_ids(drafter, drafter.logits(drafter.model.norm(states)).argmax(-1))
    window = drafter.config.correction_window
    tokens = torch.zeros(*states.shape[:-1], dtype=torch.long, device=states.device)
    recent = torch.full_like(tokens[..., :1], -1).expand(*tokens.shape[:-1], window)
    for k in range(slots):
        normed = drafter.model.correct(states[..., k, :], drafter.embed(recent))
        tokens[..., k] = to_ids(drafter, drafter.logits(normed).argmax(-1))
        recent = torch.cat([tokens[..., k : k + 1], recent], -1)[..., :window]
    return tokens


def to_ids(drafter: DFlashDrafter, columns: Tensor) -> Tensor:
    """Target ids of draft-vocabulary columns."""
    return columns if drafter.draft_ids is None else drafter.draft_ids.to(columns.device)[columns]


@torch.no_grad()
def accepted_lengths(drafter: DFlashDrafter, item: Features, block: int, device: torch.device) -> Tensor:
    """``Long[A]`` accepted length at every anchor of one greedy document."""
    batch = collate([item], [draw_anchors(item, 0, None)], block).to(device)
    features = drafter.model.tap_features(batch.taps.to(drafter.model.fc.weight.dtype))
    anchor_ids = batch.ids.gather(1, batch.anchors)
    states = drafter.states(features, batch.anchors, anchor_ids, block, batch.valid)
    drafted = greedy_block(drafter, states)
    right = (drafted == batch.tokens) & batch.present
    return right.long().cumprod(-1).sum(-1)[0].cpu()


def replay(lengths: Sequence[int]) -> tuple[int, int]:
    """Tokens and rounds when each round starts where the last one ended; ``lengths`` by anchor offset."""
    at, rounds = 0, 0
    while at < len(lengths):
        at += lengths[at] + 1
        rounds += 1
    return at, rounds


def evaluate(
    drafter: DFlashDrafter,
    items: Sequence[Features],
    block: int | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> Acceptance:
    """Acceptance on held-out greedy documents (those with temperature 0; others are refused as meaningless)."""
    block = block or drafter.block_size
    reached = torch.zeros(block)
    anchors = tokens = rounds = 0
    for item in items:
        if item.document.temperature != 0:
            raise ValueError(f"document {item.document.key} was not generated greedily")
        lengths = accepted_lengths(drafter, item, block, torch.device(device))
        reached += (lengths[:, None] > torch.arange(block)).sum(0)
        anchors += len(lengths)
        new, passes = replay(lengths.tolist())
        tokens, rounds = tokens + new, rounds + passes
        if on_progress:
            on_progress(1)
    shares = tuple(float(r) / max(anchors, 1) for r in reached)
    return Acceptance(tokens / max(rounds, 1), shares, rounds)
