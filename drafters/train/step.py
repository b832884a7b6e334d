"""One training step's arithmetic: from a batch to a loss, by the same modules that serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.batches import Batch
from specdiff.drafters.train.losses import Variation, decay_weights, dpace_weights, linear_soft_target_loss


@dataclass(frozen=True)
class LossConfig:
    """What is minimised.

    Attributes:
        weighting: "decay" (``exp(-(k-1)/gamma)``) or "dpace".
        gamma: of the decay.
        hard: share of plain cross-entropy on the target's own top token; the rest is ``distance`` to its law.
        dpace_floor: see :func:`dpace_weights`.
        distance: "kl", or "tv" (:func:`total_variation`).
    """

    weighting: str = "decay"
    gamma: float = 4.0
    hard: float = 0.1
    dpace_floor: float = 0.5
    distance: str = "kl"


class BlockObjective(nn.Module):
    """The drafter with its loss as one module, so that data-parallel wrappers see a single forward call.

    Args:
        drafter: bound to its target.
        config: the loss.
        columns: ``Long[V]`` column of each target id in the draft vocabulary, -1 outside it.
    """

    drafter: DFlashDrafter

    def __init__(self, drafter: DFlashDrafter, config: LossConfig) -> None:
        super().__init__()
        self.model = drafter.model  # the only thing registered: what is trained
        object.__setattr__(self, "drafter", drafter)
        self.config = config
        self.columns = draft_columns(drafter)
        self.head = drafter.head

    def slots(self, batch: Batch) -> Tensor:
        """Normed states ``[B, A, K, H]`` of all slots, the document's own tokens before each (teacher forcing)."""
        drafter = self.drafter
        anchor_ids = batch.ids.gather(1, batch.anchors)
        features = drafter.model.tap_features(batch.taps.to(drafter.model.fc.weight.dtype))
        x = drafter.states(features, batch.anchors, anchor_ids, batch.tokens.shape[2], batch.valid)
        if not drafter.config.sequential:
            return drafter.model.norm(x)
        return drafter.model.correct(x, drafter.previous(batch.tokens))

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss per anchor and measurements (no gradient): ``hits`` and ``count`` per slot, ``kl``."""
        states = self.slots(batch)
        slots = states.shape[2]
        columns = self.columns.to(batch.target_ids.device)[batch.target_ids]
        known = columns >= 0
        hard = torch.zeros_like(batch.target_probs)
        hard[..., 0] = (known[..., 0] & batch.present).to(hard.dtype)
        probs = self.config.hard * hard
        variation: Variation | None = None
        if self.config.distance == "tv":
            variation = Variation(batch.target_probs.flatten(0, 2), known.flatten(0, 2), 1 - self.config.hard)
        else:
            probs = probs + (1 - self.config.hard) * batch.target_probs * known
        present = batch.present.to(probs.dtype)
        columns = columns.clamp(min=0)
        losses, best, chosen = linear_soft_target_loss(
            states.flatten(0, 2), self.head, columns.flatten(0, 2), probs.flatten(0, 2), variation
        )
        if self.config.weighting == "dpace":
            weights = dpace_weights(chosen.view(present.shape) * known[..., 0], self.config.dpace_floor)
        else:
            weights = decay_weights(slots, self.config.gamma).to(present)
        loss = (losses * (weights * present).flatten()).sum()
        hit = (best.view(present.shape) == columns[..., 0]) & known[..., 0] & batch.present
        anchors = batch.anchors.numel()
        info = {"hits": hit.sum((0, 1)), "count": batch.present.sum((0, 1)), "loss": loss.detach() / anchors}
        return loss / anchors, info


def draft_columns(drafter: DFlashDrafter) -> Tensor:
    """``Long[V]`` column of each target id in the draft vocabulary, -1 outside it."""
    vocab = drafter.config.vocab_size
    if drafter.draft_ids is None:
        return torch.arange(vocab)
    columns = torch.full((vocab,), -1, dtype=torch.long)
    columns[drafter.draft_ids.cpu()] = torch.arange(len(drafter.draft_ids))
    return columns
