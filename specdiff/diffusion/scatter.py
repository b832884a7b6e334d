"""A key/value cache that writes at given positions: what every block cache, exact or approximate, is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Slots:
    """What all layers of one cache share: where the current pass writes and how far it reads."""

    def __init__(self, capacity: int, batch: int) -> None:
        self.capacity = capacity
        self.batch = batch
        self.slots: Tensor | None = None
        self.view = 0
        self.rows: Tensor | None = None


class ScatterLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer of ``capacity + 1`` slots; slot 0 takes what padding writes."""

    is_sliding = False

    def __init__(self, shared: _Slots) -> None:
        self._shared = shared
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[B, H, view, D]``, slot 0 included."""
        return None if self._keys is None else self._keys[:, :, : self._shared.view]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """As ``keys``."""
        return None if self._values is None else self._values[:, :, : self._shared.view]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers in the shape of the first states; for all rows, where only some take part yet."""
        slots = self._shared.capacity + 1
        rows = key_states.shape[0] if self._shared.rows is None else self._shared.batch
        self._keys = key_states.new_zeros(rows, key_states.shape[1], slots, key_states.shape[-1])
        self._values = value_states.new_zeros(rows, value_states.shape[1], slots, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write at the slots of the pass, return the view."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._keys is not None and self._values is not None and self._shared.slots is not None
        rows, view = self._shared.rows, self._shared.view
        if rows is not None:
            self._keys[rows[:, None], :, self._shared.slots] = key_states.transpose(1, 2)
            self._values[rows[:, None], :, self._shared.slots] = value_states.transpose(1, 2)
            return self._keys[rows, :, :view], self._values[rows, :, :view]
        index = self._shared.slots[:, None, :, None]
        self._keys.scatter_(2, index.expand_as(key_states), key_states)
        self._values.scatter_(2, index.expand_as(value_states), value_states)
        return self._keys[:, :, :view], self._values[:, :, :view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._shared.view, 0

    def get_seq_length(self) -> int:
        return max(self._shared.view - 1, 0)

    def get_max_length(self) -> int:
        return self._shared.capacity

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys[rows]
            self._values = self._values[rows]


class ScatterCache(Cache):
    """A cache for ``capacity`` logical positions per row.

    Before each forward, :meth:`aim` says where the new keys and values go and how many positions are read back; the
    attention mask (built by the denoiser) decides which of those count.

    Args:
        layers: attention layers of the model.
        capacity: positions per row.
        batch: rows, for a cache with ``keep_rows``.
    """

    keep_rows = False
    """For a cache that outlives a loop: :meth:`select` only narrows what takes part until :meth:`all_rows`."""

    def __init__(self, layers: int, capacity: int, batch: int = 0) -> None:
        self._shared = _Slots(capacity, batch)
        self._own = [ScatterLayer(self._shared) for _ in range(layers)]
        super().__init__(layers=list(self._own))
        self.capacity = capacity

    def aim(self, positions: Tensor, valid: Tensor, extent: int) -> None:
        """Set the slots of the next forward.

        Args:
            positions: ``Long[B, T]`` logical position of each input.
            valid: ``Bool[B, T]``; others go to the waste slot.
            extent: positions ``0 .. extent - 1`` are read.
        """
        self._shared.slots = torch.where(valid, positions + 1, 0)
        self._shared.view = extent + 1

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``: ``Long[b]``, or with ``keep_rows`` let only them take part."""
        if self.keep_rows:
            self._shared.rows = rows if self._shared.rows is None else self._shared.rows[rows]
            return
        for layer in self._own:
            layer.select(rows)

    def all_rows(self) -> None:
        """All rows take part again."""
        self._shared.rows = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._shared.view - 1, 0)
