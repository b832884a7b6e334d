"""One adapter around any Hugging Face causal LM: ragged passes, tapped states, only the head rows that are needed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.cache.kinds import refusal
from specdiff.cache.ragged import RaggedCache
from specdiff.errors import UnsupportedError

FIRST_CAPACITY = 1024
"""Columns reserved beyond the prompt at first; longer requests grow their buffers by doubling."""


@dataclass
class Pass:
    """What one target pass gives.

    Attributes:
        logits: ``float32[B, T, V]`` (``head="all"``), ``[B, 1, V]`` of each row's last valid input (``"last"``), None.
        taps: ``[B, T, n*H]`` states after the tapped layers, in tap order, or None.
    """

    logits: Tensor | None
    taps: Tensor | None


class TargetState(Protocol):
    """The target's side of one request: its cache, and how far each row is committed."""

    lengths: list[int]
    """Committed tokens per row whose keys and values are in the cache; the anchor is not among them."""

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """Run ``tokens``: ``Long[B, T]`` (left-aligned, ``counts``: ``Long[B]`` valid) after the committed ones.

        Nothing is committed: a second ``forward`` without ``advance`` overwrites the first.
        """
        ...

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first ``counts[r]`` inputs of the last pass, per row."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in that order."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Shorten rows to ``lengths`` committed tokens."""
        ...

    def close(self) -> None:
        """Release the cache."""
        ...


class Target:
    """A Hugging Face causal LM seen as a target. The model object is never altered.

    Args:
        model: any decoder-only causal LM of transformers.

    Raises:
        UnsupportedError: when the model's cache cannot be served right; the message says why and what to do.
    """

    name = "general"

    def __init__(self, model: PreTrainedModel) -> None:
        why = refusal(model)
        if why is not None:
            raise UnsupportedError(f"{type(model).__name__} cannot be a target: {why}")
        self.model = model
        text = model.config.get_text_config()
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.vocab_size: int = text.vocab_size
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        for needed in ("attention_mask", "position_ids"):
            if needed not in parameters:
                raise UnsupportedError(
                    f"{type(model).__name__} cannot be a target: its forward takes no {needed}, so rows of unequal "
                    "length cannot be told apart; use plain generate for it"
                )
        self.slices_head = "logits_to_keep" in parameters

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype

    def open(self, batch: int, capacity: int, taps: Sequence[int] = ()) -> GeneralState:
        """Start a request of ``batch`` rows that needs at most ``capacity`` columns."""
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise UnsupportedError(
                    f"tap {tap} does not exist: {type(self.model).__name__} has {self.num_layers} layers"
                )
        return GeneralState(self, batch, capacity, tuple(taps))


class GeneralState:
    """:class:`TargetState` through the stock modelling code."""

    def __init__(self, target: Target, batch: int, capacity: int, taps: tuple[int, ...]) -> None:
        self.target = target
        self.taps = taps
        self.lengths = [0] * batch
        self.cache = RaggedCache(target.num_layers, min(capacity, FIRST_CAPACITY), capacity)

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """See :meth:`TargetState.forward`."""
        target, span = self.target, self.cache.span
        device = target.device
        start = torch.tensor(self.lengths, device=device)
        span.begin(start, self.lengths, tokens.shape[1])
        positions = span.positions()
        if target.max_positions is not None:
            # Only padding of a ragged pass can lie past the last position while the row itself does not.
            inside = torch.arange(tokens.shape[1], device=device) < counts[:, None]
            positions = torch.where(inside, positions, positions.clamp(max=target.max_positions - 1))
        arguments: dict[str, Any] = {
            "input_ids": tokens.to(device),
            "position_ids": positions,
            "attention_mask": span.causal_mask(target.dtype),
            target.cache_name: self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        last = (counts - 1).clamp(min=0)
        keep: Tensor | None = None
        if target.slices_head:
            if head == "last":
                keep = torch.unique(last)
                arguments["logits_to_keep"] = keep
            elif head is None:
                arguments["logits_to_keep"] = 1
        with torch.no_grad(), captured(target.model, self.taps) as states:
            logits = target.model(**arguments).logits
            tapped = torch.cat([states[i].to(device) for i in self.taps], dim=-1) if self.taps else None
            if head is None:
                return Pass(None, tapped)
            if head == "last":
                index = last if keep is None else torch.searchsorted(keep, last)
                logits = logits[torch.arange(len(self.lengths), device=logits.device), index.to(logits.device)][:, None]
            return Pass(logits.to(device=device, dtype=torch.float32), tapped)

    def advance(self, counts: Sequence[int]) -> None:
        """See :meth:`TargetState.advance`."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """See :meth:`TargetState.select`."""
        self.cache.select(torch.tensor(rows, dtype=torch.long))
        self.lengths = [self.lengths[row] for row in rows]

    def rollback(self, lengths: Sequence[int]) -> None:
        """See :meth:`TargetState.rollback`."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def close(self) -> None:
        """See :meth:`TargetState.close`."""
        self.cache = RaggedCache(0, 0, 0)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers: the only ModuleList of the text model as long as its ``num_hidden_layers``."""
    wanted = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedError(f"{type(model).__name__}: no list of {wanted} decoder layers found to read states from")


@contextmanager
def captured(model: PreTrainedModel, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the states after the given layers during the passes made inside, by this thread alone.

    As in ``output_hidden_states``, the state of the last layer is the one after the final norm. Only tapped states are
    kept, so the cost does not grow with depth.
    """
    states: dict[int, Tensor] = {}
    if not taps:
        yield states
        return
    me = threading.get_ident()
    layers = decoder_layers(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model

    def record(tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == me:
                states[tap] = (
                    output[0] if isinstance(output, (tuple, list)) else getattr(output, "last_hidden_state", output)
                )

        return hook

    handles = []
    try:
        for tap in taps:
            module = decoder if tap == len(layers) - 1 else layers[tap]
            handles.append(module.register_forward_hook(record(tap)))
        yield states
    finally:
        for handle in handles:
            handle.remove()
