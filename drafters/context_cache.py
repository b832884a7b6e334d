"""The drafter's own key/value cache: rows of different lengths in one preallocated buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import on_host


class ContextCache:
    """Keys and values of committed positions for every draft layer, and how many each row holds.

    Row r writes at its own logical positions ``lengths[r], lengths[r] + 1, ...``. What lies past a row's length is left
    over from padding or rejected tokens; :meth:`visible` hides it, later writes replace it. Rolling back moves a length
    and copies nothing.

    Args:
        layers: number of draft layers.
        batch: rows.
        groups: key/value heads.
        width: head width.
        capacity: positions to make room for; the buffer doubles when that is not enough.
        device: where.
        dtype: of the buffer.
    """

    def __init__(
        self, layers: int, batch: int, groups: int, width: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (layers, batch, groups, max(capacity, 1), width)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0
        """No row is longer than this (exact on the CPU; elsewhere a bound, so that nothing waits for the device)."""

    @property
    def capacity(self) -> int:
        """Positions of the buffer."""
        return self.keys.shape[3]

    def positions(self, width: int) -> Tensor:
        """``Long[B, width]`` the logical positions that the next ``width`` entries of each row take."""
        return self.lengths[:, None] + torch.arange(width, device=self.lengths.device)

    def append(self, pairs: Sequence[tuple[Tensor, Tensor]], counts: Tensor) -> None:
        """Write ``[B, g, T, D]`` keys and values per layer after each row's length; the first ``counts`` are real."""
        width = pairs[0][0].shape[2]
        self._reserve(self.longest + width)
        where = self.positions(width)[:, None, :, None]
        for layer, (k, v) in enumerate(pairs):
            index = where.expand(k.shape)
            self.keys[layer].scatter_(2, index, k.to(self.keys.dtype))
            self.values[layer].scatter_(2, index, v.to(self.values.dtype))
        self.lengths = self.lengths + counts
        self.longest = int(self.lengths.max()) if on_host(self.lengths) else self.longest + width

    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        extra = max(needed, 2 * self.capacity) - self.capacity
        pad = (*self.keys.shape[:3], extra, self.keys.shape[4])
        self.keys = torch.cat([self.keys, self.keys.new_zeros(pad)], 3)
        self.values = torch.cat([self.values, self.values.new_zeros(pad)], 3)

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Views ``[B, g, T, D]`` per layer, T = :attr:`longest`."""
        return [(k[:, :, : self.longest], v[:, :, : self.longest]) for k, v in zip(self.keys, self.values, strict=True)]

    def visible(self) -> Tensor:
        """``Bool[B, T]`` which positions of :meth:`read` a row holds."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``: ``Long[b]``, in that order."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]

    def rollback(self, lengths: Tensor) -> None:
        """Shorten rows to ``lengths``: ``Long[B]``; rows that are shorter already stay."""
        self.lengths = torch.minimum(self.lengths, lengths.to(self.lengths.device))
