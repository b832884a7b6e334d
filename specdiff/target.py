"""One adapter around any Hugging Face causal LM: ragged passes, tapped states, only the head rows that are needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.cache.kinds import refusal
from specdiff.cache.passes import ModelCall, captured, decoder_layers
from specdiff.cache.probe import find_serving
from specdiff.cache.states import GroupedState, Pass, RaggedState, Serving
from specdiff.errors import UnsupportedError
from specdiff.fast.recording import Recorder
from specdiff.fingerprint import Fingerprint

__all__ = ["Pass", "Target", "TargetState", "captured", "decoder_layers"]


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
        """Shorten rows to ``lengths`` committed tokens, or to fewer where a layer no longer holds what that needs.

        Windows forget what they passed and recurrent states cannot go back: ``lengths`` says what is left.
        """
        ...

    def close(self) -> None:
        """Release the cache."""
        ...


_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], Serving]] = weakref.WeakKeyDictionary()


class Target:
    """A Hugging Face causal LM seen as a target. The model object is never altered.

    Construction runs the model on a dozen tokens to find out how it can be served (:mod:`specdiff.cache.probe`); the
    result is kept per model object.

    Args:
        model: any decoder-only causal LM of transformers.

    Raises:
        UnsupportedError: when the model's cache cannot be served right; the message says why and what to do.
    """

    name = "general"
    recorder: Recorder | None = None
    """What records passes of fixed shapes, where that is done."""

    def __init__(self, model: PreTrainedModel) -> None:
        why = refusal(model)
        if why is not None:
            raise UnsupportedError(f"{type(model).__name__} cannot be a target: {why}")
        self.model = model
        text = model.config.get_text_config()
        self.hidden_size: int = getattr(text, "hidden_size", 0)
        self.num_layers: int = getattr(text, "num_hidden_layers", 0)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.call = ModelCall(model)
        self.serving = self._serving()

    def _serving(self) -> Serving:
        model = self.model
        key = (model.config._attn_implementation, model.dtype, self.device, model.training)
        found = _FOUND.get(model)
        if found is None or found[0] != key:
            found = (key, find_serving(self.call, self._state))
            _FOUND[model] = found
        return found[1]

    def _state(
        self, serving: Serving, batch: int, capacity: int, taps: tuple[int, ...] = ()
    ) -> RaggedState | GroupedState:
        plain = serving.mode == "ragged" and not any(plan.states for plan in serving.plans)
        kind = RaggedState if plain else GroupedState
        return kind(self.call, serving, batch, capacity, taps, self.max_positions)

    @property
    def vocab_size(self) -> int:
        """V as the model has it now; embeddings may be resized."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.call.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype

    @property
    def whole_prefill(self) -> bool:
        """Whether a prompt should go in as one pass, since every later pass runs token by token."""
        return self.serving.stepwise

    def weight_bytes(self) -> int:
        """Bytes of weights that a pass over one input reads: everything but an input embedding of its own."""
        embedding, head = (
            getattr(module, "weight", None)
            for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        )
        read = sum(parameter.nbytes for parameter in self.model.parameters())
        return read - embedding.nbytes if isinstance(embedding, Tensor) and head is not embedding else read

    def open(self, batch: int, capacity: int, taps: Sequence[int] = (), seen: Fingerprint | None = None) -> TargetState:
        """Start a request of ``batch`` rows that needs at most ``capacity`` columns.

        ``seen`` is the model's fingerprint as it is now, for targets that keep something of the model; None: they take
        it themselves.
        """
        self._check_taps(taps)
        return self._state(self.serving, batch, capacity, tuple(taps))

    def _check_taps(self, taps: Sequence[int]) -> None:
        for tap in taps:
            if not 0 <= tap < self.num_layers:
                raise UnsupportedError(
                    f"tap {tap} does not exist: {type(self.model).__name__} has {self.num_layers} layers"
                )
