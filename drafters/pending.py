"""Committed positions whose target states wait to be projected, until a draft needs them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 1024
"""Positions that may wait, about one prefill chunk."""


class Pending:
    """Taps of commits in order, ragged by row; :meth:`take` gives all of them as one left-aligned commit."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return sum(taps.shape[1] for taps, _ in self._parts)

    def put(self, taps: Tensor, counts: Tensor) -> None:
        """Add ``taps``: ``[B, T, W]``, of which the first ``counts``: ``Long[B]`` are real."""
        self._parts.append((taps, counts))

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``: ``Long[b]``, in that order."""
        self._parts = [(taps[rows.to(taps.device)], counts[rows]) for taps, counts in self._parts]

    def padded(self, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`take` with T = ``width``, which holds them all; ``like``: ``[B, W]`` tells the kind of taps."""
        if not self._parts:
            return like.new_zeros(len(like), width, like.shape[1]), torch.zeros_like(like[:, 0], dtype=torch.long)
        taps, counts = self.take()
        return F.pad(taps.to(like.dtype), (0, 0, 0, width - taps.shape[1])), counts

    def take(self) -> tuple[Tensor, Tensor]:
        """All of it as ``([B, T, W], Long[B])``, and forget it."""
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        taps, counts = torch.cat([t for t, _ in parts], 1), torch.stack([c for _, c in parts])
        padding = torch.cat(
            [torch.arange(t.shape[1], device=c.device) >= c[:, None] for t, c in parts], 1
        )  # sorted behind what is real; the order of that stays
        order = padding.long().argsort(dim=1, stable=True).to(taps.device)
        return taps.gather(1, order[..., None].expand_as(taps)), counts.sum(0)
