"""The fast path's side of one request: a preallocated cache, and passes that write at each row's own position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.cache.states import Pass
from specdiff.fast.packed import PackedModel, rotary_tables, row_span, run_layer

FIRST_CAPACITY = 1024
"""Cache columns per row at first; longer requests grow their buffers by doubling."""


class FastState:
    """:class:`specdiff.target.TargetState` over packed weights.

    The cache of each layer is ``[B, 2 * g, C, D]``. Columns past a row's length hold leftovers of rejected tokens,
    which no query ever sees: each row attends over views of exactly its own length. Layers run in inference mode,
    which spares every operator some bookkeeping; what a pass returns are ordinary tensors.

    Args:
        model: the packed model.
        batch: rows.
        capacity: columns that the request may need; the buffers start smaller and double.
        taps: layers whose output states each pass returns.
    """

    def __init__(self, model: PackedModel, batch: int, capacity: int, taps: tuple[int, ...]) -> None:
        self.model = model
        self.taps = taps
        self.lengths = [0] * batch
        self.columns = 0
        self.caches: list[Tensor] = []
        with torch.inference_mode():
            self._grow(min(capacity, FIRST_CAPACITY))

    def _grow(self, columns: int) -> None:
        """Make room for ``columns`` per row, keeping what is committed."""
        parts, kept, old = self.model.parts, max(self.lengths, default=0), self.caches
        self.caches = []
        for at in range(len(self.model.layers)):
            shape = (len(self.lengths), 2 * parts.kv_heads, columns, parts.head_dim)
            fresh = torch.empty(shape, dtype=torch.float32)
            if old:
                fresh[:, :, :kept] = old[at][:, :, :kept]
            self.caches.append(fresh)
        self.columns = columns
        self.turns = rotary_tables(parts, columns)
        self.line = torch.arange(columns)

    def _run(self, tokens: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers over ``tokens``: ``Long[B, T]``. Gives the residual stream ``[N, H]`` and the tapped ones."""
        model, width = self.model, tokens.shape[1]
        needed = max(self.lengths) + width
        if needed > self.columns:
            self._grow(max(needed, 2 * self.columns))
        spans = [row_span(self.line, start, width) for start in self.lengths]
        positions = torch.cat([span.columns for span in spans])
        turns = {kind: table.index_select(0, positions) for kind, table in self.turns.items()}
        x = model.parts.embed(tokens.reshape(-1))
        kept: dict[int, Tensor] = {}
        for at, (layer, cache) in enumerate(zip(model.layers, self.caches, strict=True)):
            x = run_layer(model.parts, layer, x, cache, spans, None if layer.rotary is None else turns[layer.rotary])
            if at in self.taps:
                kept[at] = x
        return x, kept

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """See :meth:`specdiff.target.TargetState.forward`."""
        model, (batch, width) = self.model, tokens.shape
        last = len(model.layers) - 1
        with torch.inference_mode():
            x, kept = self._run(tokens)
        with torch.no_grad():
            # As in ``output_hidden_states``, the state after the last layer is the one after the final norm.
            final = model.norm(x) if head == "all" or last in kept else None
            if final is not None and last in kept:
                kept[last] = final
            taps = torch.cat([kept[tap] for tap in self.taps], dim=-1).view(batch, width, -1) if self.taps else None
            if head is None:
                return Pass(None, taps)
            if final is None or head == "last":
                ends = torch.arange(batch) * width + (counts - 1).clamp(min=0)
                final = model.norm(x[ends])
            logits = model.head(final)
            if model.parts.softcap is not None:
                logits = torch.tanh(logits / model.parts.softcap) * model.parts.softcap
            return Pass(logits.view(batch, -1, logits.shape[-1]), taps)

    def advance(self, counts: Sequence[int]) -> None:
        """See :meth:`specdiff.target.TargetState.advance`."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """See :meth:`specdiff.target.TargetState.select`."""
        self.lengths = [self.lengths[row] for row in rows]
        kept = max(self.lengths, default=0)
        with torch.inference_mode():
            index = torch.tensor(rows, dtype=torch.long)
            for at, cache in enumerate(self.caches):
                fresh = torch.empty(len(rows), *cache.shape[1:], dtype=torch.float32)
                fresh[:, :, :kept] = cache[index, :, :kept]
                self.caches[at] = fresh

    def rollback(self, lengths: Sequence[int]) -> None:
        """See :meth:`specdiff.target.TargetState.rollback`."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def close(self) -> None:
        """See :meth:`specdiff.target.TargetState.close`."""
        self.caches = []
