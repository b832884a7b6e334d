"""Where the running pass writes, how far it may look, and the masks that say so. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.fast.uploads import upload

SLACK = 64
"""Spare columns of a windowed buffer beyond window and pass: how many tokens pass between two compactions, at least."""


class Span:
    """One pass over some rows of a cache; shared by all of its full-attention layers.

    Attributes:
        batch: rows that the cache holds.
        rows: the rows of the running pass, ascending; a slice when they are neighbours, so that views suffice.
        start: ``Long[g]`` committed length of those rows, where the pass begins.
        width: inputs per row of the running pass (T).
        view: columns that attention reads, ``max(start) + width``.
        uniform: the common start when all rows of the pass start at the same column, else None.
        capacity: columns that buffers have.
        limit: columns after which growth by doubling stops (the most that the request can need).
    """

    def __init__(self, batch: int = 0, capacity: int = 0, limit: int = 0) -> None:
        self.batch, self.capacity, self.limit = batch, capacity, limit
        self.rows: slice | Tensor = slice(None)
        self.row_list: list[int] = []
        self.start: Tensor = torch.zeros(0, dtype=torch.long)
        self.width = 0
        self.view = 0
        self.uniform: int | None = None

    def begin(self, start: Tensor, host_start: Sequence[int], width: int, rows: Sequence[int] | None = None) -> None:
        """Describe the next pass: ``host_start`` mirrors ``start`` on the host, so nothing is read back."""
        self.row_list = list(range(self.batch)) if rows is None else list(rows)
        self.rows = as_index(self.row_list, self.batch)
        self.start, self.width = start, width
        self.view = max(host_start) + width
        self.uniform = host_start[0] if len(set(host_start)) == 1 else None
        if self.view > self.capacity:
            # A conversation may outgrow the limit of its first request: doubling goes on then.
            doubled = 2 * self.capacity
            self.capacity = max(self.view, doubled if self.view > self.limit else min(self.limit, doubled))

    def positions(self) -> Tensor:
        """``Long[g, T]`` logical position of every input."""
        return self.start[:, None] + torch.arange(self.width, device=self.start.device)

    def causal_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive ``[g, 1, T, view]`` mask: 0 where column j <= position, the dtype's minimum elsewhere."""
        columns = torch.arange(self.view, device=self.start.device)
        return additive(columns > self.positions()[..., None], dtype)


class WindowSpan:
    """The same for layers that see a window: buffers keep a stretch of each row that begins at its ``base``.

    Row ``r``'s token ``j`` is in column ``j - base[r]``. When a buffer is full the last ``window - 1`` tokens move to
    its front and ``base`` grows, so memory is O(window + pass), whatever the context.

    Args:
        span: the cache's span.
        window: tokens that a query sees, itself included (the chunk size for chunked attention).
        chunked: queries see their own chunk of positions only, instead of a sliding window.
    """

    def __init__(self, span: Span, window: int, *, chunked: bool = False) -> None:
        self.span, self.window, self.chunked = span, window, chunked
        self.base = [0] * span.batch
        self.capacity = 0
        self.low = self.high = 0
        self.moves: list[tuple[int, int]] = []

    def begin(self, host_start: Sequence[int]) -> None:
        """Make room for the pass that ``span`` describes; ``moves`` lists (row, columns to drop) for the buffers."""
        rows, width = self.span.row_list, self.span.width
        self.moves = []
        most = max(start + width - self.base[row] for row, start in zip(rows, host_start, strict=True))
        if most > self.capacity:
            # What every row keeps is what its next queries see; all rows move at once, so moves stay rare.
            for row, start in zip(rows, host_start, strict=True):
                drop = max(0, start - (self.window - 1)) - self.base[row]
                if drop > 0:
                    self.moves.append((row, drop))
                    self.base[row] += drop
            most = max(start + width - self.base[row] for row, start in zip(rows, host_start, strict=True))
            if most > self.capacity - SLACK // 2:
                self.capacity = max(most, self.capacity, min(self.span.limit, max(most, self.window) + SLACK))
        reach = [
            max(0, start - (self.window - 1)) - self.base[row] for row, start in zip(rows, host_start, strict=True)
        ]
        self.low = max(0, min(reach))
        self.high = most

    def columns(self) -> Tensor:
        """``Long[g, T]`` buffer column of every input."""
        return self.span.positions() - self._bases()

    def _bases(self) -> Tensor:
        bases = [self.base[row] for row in self.span.row_list]
        return upload(bases, self.span.start.device)[:, None]

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive ``[g, 1, T, high - low]`` mask over the columns that attention reads."""
        held = self._bases() + torch.arange(self.low, self.high, device=self.span.start.device)
        query, key = self.span.positions()[..., None], held[:, None, :]
        if self.chunked:
            outside = torch.div(key, self.window, rounding_mode="floor") != torch.div(
                query, self.window, rounding_mode="floor"
            )
        else:
            outside = key <= query - self.window
        return additive(outside | (key > query), dtype)

    def keeps(self, row: int, length: int) -> bool:
        """Whether everything that the tokens after ``length`` can see is still in the buffer."""
        return self.base[row] == 0 or length - (self.window - 1) >= self.base[row]


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """``Bool[g, T, C]`` (True = not visible) as an additive ``[g, 1, T, C]`` mask of the dtype."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def as_index(rows: Sequence[int], batch: int) -> slice | Tensor:
    """Neighbouring ascending rows as a slice (indexing then gives a view), any others as a tensor."""
    if len(rows) == batch and list(rows) == list(range(batch)):
        return slice(None)
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(list(rows), dtype=torch.long)
