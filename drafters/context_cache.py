"""The drafter's own key/value cache: rows of different lengths in one preallocated buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import on_host
from specdiff.fast.recording import bucket


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
        buckets: what is read has one of a few lengths, so that steps can be recorded.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        groups: int,
        width: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        buckets: bool = False,
    ) -> None:
        capacity = bucket(capacity) if buckets else capacity
        self.buckets = buckets
        shape = (layers, batch, groups, max(capacity, 1), width)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.longest = 0
        """No row is longer than this: exact where the host knows lengths, else a bound, so that nothing waits."""

    @property
    def capacity(self) -> int:
        """Positions of the buffer."""
        return self.keys.shape[3]

    @property
    def view(self) -> int:
        """Positions that :meth:`read` gives."""
        return min(bucket(self.longest), self.capacity) if self.buckets else self.longest

    def restart(self) -> None:
        """Begin again from nothing; what is masked is still multiplied by zero, so nothing may be left of the past."""
        for buffer in (self.keys, self.values):
            buffer.zero_()
        self.lengths, self.longest = torch.zeros_like(self.lengths), 0

    def positions(self, width: int) -> Tensor:
        """``Long[B, width]`` the logical positions that the next ``width`` entries of each row take."""
        return self.lengths[:, None] + torch.arange(width, device=self.lengths.device)

    def append(self, pairs: Sequence[tuple[Tensor, Tensor]], counts: Tensor, most: int | None = None) -> None:
        """Write keys and values after each row's length.

        Args:
            pairs: ``[B, g, T, D]`` each, per layer.
            counts: ``Long[B]`` how many of the T are real.
            most: the longest row afterwards, where the host knows it without asking the device.
        """
        width = pairs[0][0].shape[2]
        self.reserve(self.longest + width)
        where = self.positions(width)[:, None, :, None]
        for layer, (k, v) in enumerate(pairs):
            index = where.expand(k.shape)
            self.keys[layer].scatter_(2, index, k.to(self.keys.dtype))
            self.values[layer].scatter_(2, index, v.to(self.values.dtype))
        self.lengths = self.lengths + counts
        if most is None:
            most = int(self.lengths.max()) if on_host(self.lengths) else self.longest + width
        self.longest = most

    def reserve(self, needed: int) -> bool:
        """Make room for ``needed`` positions per row; True if the buffers had to move."""
        if needed <= self.capacity:
            return False
        extra = max(needed, 2 * self.capacity) - self.capacity
        pad = (*self.keys.shape[:3], extra, self.keys.shape[4])
        self.keys = torch.cat([self.keys, self.keys.new_zeros(pad)], 3)
        self.values = torch.cat([self.values, self.values.new_zeros(pad)], 3)
        return True

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Views ``[B, g, T, D]`` per layer, T = :attr:`view`."""
        view = self.view
        return [(k[:, :, :view], v[:, :, :view]) for k, v in zip(self.keys, self.values, strict=True)]

    def visible(self) -> Tensor:
        """``Bool[B, T]`` which positions of :meth:`read` a row holds."""
        return torch.arange(self.view, device=self.lengths.device) < self.lengths[:, None]

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``: ``Long[b]``, in that order."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]

    def rollback(self, lengths: Tensor) -> None:
        """Shorten rows to ``lengths``: ``Long[B]``; rows that are shorter already stay."""
        self.lengths = torch.minimum(self.lengths, lengths.to(self.lengths.device))
