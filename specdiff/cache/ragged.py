"""A transformers cache whose rows advance by different amounts.

Keys and values live in preallocated buffers ``[B, H, C, D]`` at their *logical* positions (padding excluded): token
``j`` of a row is in column ``j``. A pass writes at ``start[r] + t`` and sees columns ``0 .. start[r] + t``, said by an
explicit additive mask. Whatever lies past a row's committed length (rejected drafts, padding of a ragged pass) is
invisible and is overwritten before it could be seen, so rolling back moves a number and copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Span:
    """Where the running pass writes and how far it may look; shared by all layers of one cache.

    Attributes:
        start: ``Long[B]`` committed length of each row, where the pass begins.
        width: inputs per row of the running pass (T).
        view: columns that attention reads, at least ``max(start) + width``.
        uniform: the common start when all rows start at the same column, else None.
    """

    def __init__(self) -> None:
        self.start: Tensor = torch.zeros(0, dtype=torch.long)
        self.width = 0
        self.view = 0
        self.uniform: int | None = None
        self.capacity = 0
        self.limit = 0

    def begin(self, start: Tensor, host_start: list[int], width: int) -> None:
        """Describe the next pass: ``host_start`` mirrors ``start`` on the host, so nothing is read back."""
        self.start, self.width = start, width
        self.view = max(host_start) + width
        self.uniform = host_start[0] if len(set(host_start)) == 1 else None
        if self.view > self.capacity:
            self.capacity = max(self.view, min(self.limit, 2 * self.capacity))

    def positions(self) -> Tensor:
        """``Long[B, T]`` logical position of every input."""
        return self.start[:, None] + torch.arange(self.width, device=self.start.device)

    def causal_mask(self, dtype: torch.dtype) -> Tensor:
        """Additive ``[B, 1, T, view]`` mask: 0 where column j <= position, the dtype's minimum elsewhere."""
        columns = torch.arange(self.view, device=self.start.device)
        hidden = columns > self.positions()[..., None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer at per-row positions."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, span: Span) -> None:
        super().__init__()
        self.span = span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers from the first states: ``[B, H, T, D]`` each."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        batch, heads, _, size = like.shape
        return torch.zeros(batch, heads, self.span.capacity, size, dtype=like.dtype, device=like.device)

    def _grown(self, old: Tensor) -> Tensor:
        new = self._buffer(old)
        new[:, :, : old.shape[2]] = old
        return new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's states and return views of everything attention may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        span = self.span
        if span.capacity > self.keys.shape[2]:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        if span.uniform is not None:
            stop = span.uniform + span.width
            self.keys[:, :, span.uniform : stop] = key_states
            self.values[:, :, span.uniform : stop] = value_states
        else:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            columns = span.positions().to(key_states.device)
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys[:, :, : span.view], self.values[:, :, : span.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.span.view, 0

    def get_seq_length(self) -> int:
        """Columns in use before the running pass (the longest row)."""
        return self.span.view - self.span.width

    def get_max_length(self) -> int:
        """No maximum: buffers grow."""
        return -1

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys = self.keys.index_select(0, rows.to(self.keys.device))
            self.values = self.values.index_select(0, rows.to(self.values.device))


class RaggedCache(Cache):
    """All layers of a full-attention target.

    Args:
        layers: number of cache layers.
        capacity: columns to allocate at first.
        limit: columns after which growth by doubling stops (the most that the request can need).
    """

    def __init__(self, layers: int, capacity: int, limit: int) -> None:
        self.span = Span()
        self.span.capacity, self.span.limit = capacity, limit
        self.ragged = [RaggedLayer(self.span) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in every layer."""
        for layer in self.ragged:
            layer.select(rows)
