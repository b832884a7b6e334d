"""Training batches: documents with random anchors and what the target says at every drafted slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.train.features import Features


@dataclass(eq=False)
class Batch:
    """B documents padded to T, A anchors each, K slots per anchor.

    Attributes:
        ids: ``Long[B, T]`` tokens (0 where padded).
        valid: ``Bool[B, T]`` positions that exist.
        taps: ``float16[B, T, n * H]``.
        anchors: ``Long[B, A]`` anchor positions.
        tokens: ``Long[B, A, K]`` the document's tokens after each anchor.
        present: ``Bool[B, A, K]`` slots whose token exists.
        target_ids: ``Long[B, A, K, k]`` the target's top ids for each slot, given the document before it.
        target_probs: ``float32[B, A, K, k]`` their probabilities.
    """

    ids: Tensor
    valid: Tensor
    taps: Tensor
    anchors: Tensor
    tokens: Tensor
    present: Tensor
    target_ids: Tensor
    target_probs: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def draw_anchors(features: Features, count: int, rng: np.random.Generator | None) -> np.ndarray:
    """Anchor positions of one document: response tokens that have at least one token after them.

    ``rng`` draws ``count`` of them without repeats (with repeats if there are fewer); None gives all, in order.
    """
    first, last = max(features.document.prompt_length, 1), len(features.document) - 1
    positions = np.arange(first, last) if last > first else np.array([max(last - 1, 0)])
    if rng is None:
        return positions
    return np.sort(rng.choice(positions, count, replace=len(positions) < count))


def collate(items: Sequence[Features], anchors: Sequence[np.ndarray], block: int) -> Batch:
    """Pad documents and their anchors (equal numbers of them) into a :class:`Batch`."""
    rows, width = len(items), max(len(f.document) for f in items)
    top = items[0].top_ids.shape[1]
    flat = items[0].taps.shape[1] * items[0].taps.shape[2]
    ids = np.zeros((rows, width), np.int64)
    valid = np.zeros((rows, width), bool)
    taps = np.zeros((rows, width, flat), np.float16)
    where = np.stack(anchors)
    target_ids = np.zeros((*where.shape, block, top), np.int64)
    target_probs = np.zeros((*where.shape, block, top), np.float32)
    tokens = np.zeros((*where.shape, block), np.int64)
    present = np.zeros((*where.shape, block), bool)
    for row, item in enumerate(items):
        n = len(item.document)
        ids[row, :n], valid[row, :n] = item.document.ids, True
        taps[row, :n] = item.taps.reshape(n, flat)
        slot = where[row][:, None] + 1 + np.arange(block)  # position of each drafted token
        exists = slot < n
        slot = np.minimum(slot, n - 1)
        present[row] = exists
        tokens[row] = np.where(exists, item.document.ids[slot], 0)
        target_ids[row] = item.top_ids[slot - 1]  # the law of a token is read one position before it
        target_probs[row] = np.exp(item.top_logprobs[slot - 1].astype(np.float32)) * exists[..., None]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(valid),
        torch.from_numpy(taps),
        torch.from_numpy(where),
        torch.from_numpy(tokens),
        torch.from_numpy(present),
        torch.from_numpy(target_ids),
        torch.from_numpy(target_probs),
    )
