"""Attention layers whose rows advance by different amounts.

Keys and values live in preallocated buffers ``[B, H, C, D]`` at their *logical* positions (padding excluded): row
``r``'s token ``j`` is in column ``j``. A pass writes at ``start[r] + t`` and sees columns ``0 .. start[r] + t``, said
by an explicit additive mask. Whatever lies past a row's committed length (rejected drafts, padding of a ragged pass) is
invisible and is overwritten before it could be seen, so rolling back moves a number and copies nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from specdiff.cache.spans import Span, WindowSpan
from specdiff.errors import UnsupportedError
from specdiff.fast.uploads import upload


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer at per-row positions."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, span: Span) -> None:
        super().__init__()
        self.span = span
        self.indexer: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers from the first states: ``[g, H, T, D]`` each."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's states and return views of everything attention may read."""
        if not self.is_initialized:
            RaggedLayer.lazy_initialization(self, key_states, value_states)
        self._make_room()
        assert self.keys is not None and self.values is not None
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        return self._read(self.keys), self._read(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.span.view, 0

    def get_seq_length(self) -> int:
        """Tokens before the running pass (the longest row)."""
        return self.span.view - self.span.width

    def get_max_length(self) -> int:
        """No maximum: buffers grow."""
        return -1

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        for name in ("keys", "values", "indexer"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.index_select(0, rows.to(held.device)))

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        return self.span.capacity

    def _columns(self) -> Tensor:
        return self.span.positions()

    def _bounds(self) -> tuple[int, int]:
        """Columns that attention reads."""
        return 0, self.span.view

    def _first_column(self) -> int | None:
        """The column where every row of the pass begins, when it is the same one."""
        return self.span.uniform

    def _buffer(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return torch.zeros(self.span.batch, heads, self._capacity(), size, dtype=like.dtype, device=like.device)

    def _make_room(self) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] < self._capacity():
                new = self._buffer(old)
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        rows, first, width = self.span.rows, self._first_column(), self.span.width
        if first is not None and isinstance(rows, slice):
            buffer[rows, :, first : first + width] = states
            return
        index = upload(self.span.row_list, states.device)[:, None]
        buffer[index, :, self._columns().to(states.device)] = states.transpose(1, 2)

    def _read(self, buffer: Tensor) -> Tensor:
        low, high = self._bounds()
        rows = self.span.rows
        if isinstance(rows, slice):
            return buffer[rows, :, low:high]
        return buffer[rows.to(buffer.device), :, low:high]


class IndexedLayer(RaggedLayer):
    """Full attention with the key cache of an indexer (DeepSeek sparse attention) beside it: ``[B, C, D]``."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """``Long[3, g, start]`` positions of the indexer keys before the pass: the columns themselves.

        Models that read it append the pass's own positions behind, which only suits rows that begin together.
        """
        if self.span.uniform is None:
            raise UnsupportedError("indexer positions of rows that begin at different columns cannot be appended to")
        past = self.span.view - self.span.width
        columns = torch.arange(past, device=self.span.start.device)
        return columns.expand(3, len(self.span.row_list), past) if past else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor | None) -> None:
        """Nothing to keep."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the pass's indexer keys ``[g, T, D]``; returns all that it may read, ``[g, view, D]``."""
        states = indexer_key_states[:, None]
        if self.indexer is None:
            self.indexer = self._buffer(states)
        elif self.indexer.shape[2] < self._capacity():
            new = self._buffer(self.indexer)
            new[:, :, : self.indexer.shape[2]] = self.indexer
            self.indexer = new
        self._write(self.indexer, states)
        return self._read(self.indexer)[:, 0]


class WindowLayer(RaggedLayer):
    """Keys and values of a sliding or chunked layer: O(window + pass) columns per row."""

    is_sliding = True

    def __init__(self, window: WindowSpan) -> None:
        super().__init__(window.span)
        self.window = window
        self.sliding_window = window.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover (one row at a time)."""
        low, high = self._bounds()
        return high - low, self.window.base[self.span.row_list[0]] + low

    def _capacity(self) -> int:
        return self.window.capacity

    def _columns(self) -> Tensor:
        return self.window.columns()

    def _bounds(self) -> tuple[int, int]:
        return self.window.low, self.window.high

    def _first_column(self) -> int | None:
        bases = {self.window.base[row] for row in self.span.row_list}
        return None if self.span.uniform is None or len(bases) > 1 else self.span.uniform - bases.pop()

    def _make_room(self) -> None:
        assert self.keys is not None and self.values is not None
        for row, drop in self.window.moves:
            for buffer in (self.keys, self.values):
                buffer[row, :, : buffer.shape[2] - drop] = buffer[row, :, drop:].clone()
        super()._make_room()
