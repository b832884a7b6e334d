"""Recurrent state (state-space scans, gated delta nets, short convolutions) that advances by exactly what is accepted.

The stock modelling code runs on a *working* copy of the committed state. After a pass the working copy is put aside,
and committing takes it over for the rows whose inputs all stood. Rows of which only a part stood keep the old state,
and the inputs that stood run again in front of their next pass: one pass per round all the same. Rows run together only
with equal numbers of inputs, so padding never goes through the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from specdiff.cache.ragged import RaggedLayer, WindowLayer
from specdiff.cache.spans import Span, WindowSpan

KINDS = ("conv_states", "recurrent_states")


class StateLayer(LinearAttentionLayer):
    """The state of one recurrent layer for all rows, behind transformers' own layer for the rows of one pass."""

    is_compileable = False

    def __init__(self, span: Span, states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self.span = span
        self.committed: dict[tuple[str, int], Tensor] = {}
        self.filled = dict.fromkeys(range(states), False)

    def open_pass(self, fresh: bool) -> None:
        """Load the committed state of the pass's rows, or none when these rows begin (``fresh``)."""
        indices = range(self.number_of_states)
        self.conv_states = dict.fromkeys(indices)
        self.recurrent_states = dict.fromkeys(indices)
        self.is_conv_states_initialized = dict.fromkeys(indices, False)
        self.is_recurrent_states_initialized = dict.fromkeys(indices, False)
        self.has_previous_state = dict.fromkeys(indices, False)
        if fresh:
            return
        for (kind, index), held in self.committed.items():
            rows = self.span.rows
            part = held[rows].clone() if isinstance(rows, slice) else held[rows.to(held.device)]
            getattr(self, kind)[index] = part
            getattr(self, f"is_{kind}_initialized")[index] = True
        self.has_previous_state = dict(self.filled)

    def close_pass(self, *, copy: bool = False) -> dict[tuple[str, int], Tensor]:
        """The state after the inputs of the pass so far, rows in the order of the pass."""
        self.filled = dict(self.has_previous_state)
        return {
            (kind, index): state.clone() if copy else state
            for kind in KINDS
            for index, state in getattr(self, kind).items()
            if getattr(self, f"is_{kind}_initialized")[index] and state is not None
        }

    def take_over(self, states: dict[tuple[str, int], Tensor], at: int, row: int) -> None:
        """Commit entry ``at`` of a pass's states as the state of ``row``."""
        for key, state in states.items():
            if key not in self.committed:
                self.committed[key] = torch.zeros(
                    self.span.batch, *state.shape[1:], dtype=state.dtype, device=state.device
                )
            self.committed[key][row] = state[at]

    def select_states(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        self.committed = {key: held.index_select(0, rows.to(held.device)) for key, held in self.committed.items()}

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        self.select_states(rows)


class StateAndFullLayer(StateLayer, RaggedLayer):  # type: ignore[misc, override]
    """Recurrent state and full attention in one layer."""

    supports_early_init = False

    def __init__(self, span: Span, states: int) -> None:
        RaggedLayer.__init__(self, span)
        StateLayer.__init__(self, span, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The state's; attention buffers are made in ``update``."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        self.select_states(rows)
        RaggedLayer.select(self, rows)


class StateAndWindowLayer(StateLayer, WindowLayer):  # type: ignore[misc, override]
    """Recurrent state and sliding attention in one layer."""

    supports_early_init = False

    def __init__(self, window: WindowSpan, states: int) -> None:
        WindowLayer.__init__(self, window)
        StateLayer.__init__(self, window.span, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The state's; attention buffers are made in ``update``."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in that order."""
        self.select_states(rows)
        WindowLayer.select(self, rows)
