"""The target's cache: one layer per plan, rows that advance by different amounts, nothing copied to roll back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer

from specdiff.cache.kinds import LayerPlan
from specdiff.cache.ragged import IndexedLayer, RaggedLayer, WindowLayer
from specdiff.cache.recurrent import StateAndFullLayer, StateAndWindowLayer, StateLayer
from specdiff.cache.spans import Span, WindowSpan

Mask = Tensor | dict[str, Tensor | None] | None


class TargetCache(Cache):
    """All layers of a target.

    Args:
        plans: one per cache layer.
        batch: rows.
        capacity: columns of full-attention layers to allocate at first.
        limit: the most columns that the request can need.
    """

    def __init__(self, plans: Sequence[LayerPlan], batch: int, capacity: int, limit: int) -> None:
        self.plans = list(plans)
        self.span = Span(batch, capacity, limit)
        self.windows: dict[tuple[str, int], WindowSpan] = {}
        self.results: list[tuple[list[int], int, list[dict[tuple[str, int], Tensor]]]] = []
        super().__init__(layers=[self._layer(plan) for plan in self.plans])
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def _layer(self, plan: LayerPlan) -> RaggedLayer | StateLayer | DummyLayer:
        if plan.attention in ("sliding", "chunked"):
            key = (plan.attention, plan.window)
            if key not in self.windows:
                self.windows[key] = WindowSpan(self.span, plan.window, chunked=plan.attention == "chunked")
            window = self.windows[key]
            return StateAndWindowLayer(window, plan.states) if plan.states else WindowLayer(window)
        if plan.attention == "indexed":
            return IndexedLayer(self.span)
        if plan.attention == "full":
            return StateAndFullLayer(self.span, plan.states) if plan.states else RaggedLayer(self.span)
        return StateLayer(self.span, plan.states) if plan.states else DummyLayer()

    # -- one pass ----------------------------------------------------------------------------------------------------

    def begin(
        self,
        start: Tensor,
        host_start: Sequence[int],
        width: int,
        rows: Sequence[int] | None = None,
        *,
        go_on: bool = False,
    ) -> None:
        """Describe the next pass: where each of its ``rows`` (all when None) begins, and its inputs per row.

        ``go_on`` continues the pass before it from its own state, instead of from the committed one.
        """
        self.span.begin(start, host_start, width, rows)
        for window in self.windows.values():
            window.begin(host_start)
        for layer in self.states if not go_on else ():
            layer.open_pass(fresh=max(host_start) == 0)

    def masks(self, dtype: torch.dtype, *, by_type: bool) -> Mask:
        """The additive masks of the pass: one tensor ``[g, 1, T, C]``, or one per layer type by its name."""
        made: dict[str, Tensor | None] = {"linear_attention": None, "conv": None}
        if any(plan.attention in ("full", "indexed") for plan in self.plans):
            made["full_attention"] = made["indexed_attention"] = made["hybrid"] = self.span.causal_mask(dtype)
        for (kind, _), window in self.windows.items():
            made[f"{kind}_attention"] = window.mask(dtype)
            if kind == "sliding":
                made["hybrid_sliding"] = made["sliding_attention"]
        if by_type:
            return made
        tensors = [mask for mask in made.values() if mask is not None]
        return tensors[0] if tensors else None

    def end(self, inputs: int, *, more: bool = False) -> None:
        """Put the recurrent state after the first ``inputs`` inputs of the pass aside, until they are committed.

        ``more`` says that the pass goes on from this state, which must then be copied.
        """
        if self.states:
            rows = list(self.span.row_list)
            self.results.append((rows, inputs, [layer.close_pass(copy=more) for layer in self.states]))

    def forget(self) -> None:
        """Drop what an earlier pass put aside."""
        self.results = []

    def take_over(self, row: int, inputs: int) -> bool:
        """Commit the state of ``row`` after its first ``inputs`` inputs; False when no pass stopped there."""
        for rows, count, states in self.results:
            if count == inputs and row in rows:
                for layer, state in zip(self.states, states, strict=True):
                    layer.take_over(state, rows.index(row), row)
                return True
        return False

    # -- rows --------------------------------------------------------------------------------------------------------

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state that cannot go back."""
        return bool(self.states)

    def kept(self, row: int, old: int, new: int) -> int:
        """How many of ``row``'s ``old`` tokens survive a rollback to ``new``: ``new`` or, where state is lost, 0."""
        if new >= old:
            return old
        if self.states or not all(window.keeps(row, new) for window in self.windows.values()):
            return 0
        return new

    def restart(self, row: int) -> None:
        """Begin ``row`` again from nothing."""
        for window in self.windows.values():
            window.base[row] = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in that order."""
        index = torch.tensor(list(rows), dtype=torch.long)
        self.forget()
        for layer in self.layers:
            if isinstance(layer, (RaggedLayer, StateLayer)):
                layer.select(index)
        for window in self.windows.values():
            window.base = [window.base[row] for row in rows]
        self.span.batch = len(index)
