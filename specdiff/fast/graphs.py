"""``GraphTarget``: passes of the stock model recorded as CUDA graphs, for any model whose layers see everything.

What an eager pass costs beyond its kernels is Python and their launches, which a small batch cannot hide. A recorded
pass has neither. It needs fixed shapes and addresses: keys and values lie in buffers that stay where they are, each row
writes at columns that are computed on the device from its length, and attention reads one of a few lengths
(:func:`specdiff.fast.recording.bucket`), the rest being masked. One graph serves all passes of as many rows, inputs
and columns. Prompts are run eagerly over the same buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.cache.kinds import LayerPlan
from specdiff.cache.manager import TargetCache
from specdiff.cache.passes import ModelCall
from specdiff.cache.probe import LENGTH, check_state
from specdiff.cache.ragged import RaggedLayer
from specdiff.cache.states import Pass, RaggedState, Serving
from specdiff.errors import UnsupportedError
from specdiff.fast.recording import CudaRecorder, Outputs, Recorder, Recordings, bucket
from specdiff.fast.uploads import upload
from specdiff.fingerprint import Fingerprint, fingerprint, interferes
from specdiff.target import Target

WIDEST = 32
"""Inputs per row up to which a pass is recorded; wider ones are prompts, whose kernels outlast their launches."""


HOOKED = "it carries hooks or a replaced forward, which a recording would not run again"


class StaticLayer(RaggedLayer):
    """Buffers that stay at their place while rows leave: the first ``span.batch`` rows are in use."""

    def select(self, rows: Tensor) -> None:
        """Move the given rows to the front, in that order."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[: len(rows)] = buffer.index_select(0, rows.to(buffer.device))

    def _make_room(self) -> None:
        batch = self.span.batch
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[2] < self._capacity():
                new = self._buffer(old)
                new[:, :, : old.shape[2]] = old[:batch]
                setattr(self, name, new)

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        rows = torch.arange(self.span.batch, device=states.device)[:, None]
        buffer[rows, :, self._columns()] = states.transpose(1, 2)

    def _read(self, buffer: Tensor) -> Tensor:
        return buffer[: self.span.batch, :, : self.span.view]


class StaticCache(TargetCache):
    """A cache of static layers."""

    def _layer(self, plan: LayerPlan) -> StaticLayer:
        return StaticLayer(self.span)

    def _begun(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers of the layers that have any."""
        layers = [layer for layer in self.layers if isinstance(layer, StaticLayer)]
        return [(x.keys, x.values) for x in layers if x.keys is not None and x.values is not None]

    def clear(self) -> None:
        """Zeros everywhere."""
        for keys, values in self._begun():
            keys.zero_()
            values.zero_()

    def rows_held(self) -> int:
        """Rows that every layer has buffers for; 0 before the first pass."""
        begun = self._begun()
        return min(keys.shape[0] for keys, _ in begun) if 0 < len(begun) == len(self.layers) else 0


class GraphState(RaggedState):
    """:class:`specdiff.target.TargetState` whose narrow passes are recorded and replayed.

    It outlives its request: closed, it is given back and waits for the next one of the same shape, graphs included.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        give_back: Callable[[GraphState], None],
        call: ModelCall,
        serving: Serving,
        batch: int,
        capacity: int,
        taps: tuple[int, ...],
        top: int | None,
    ) -> None:
        super().__init__(call, serving, batch, 0, taps, top)
        self.give_back, self.batch = give_back, batch
        self.cache: StaticCache = StaticCache(serving.plans, batch, capacity, capacity)
        self.recordings = Recordings(recorder)
        self.stamp: Fingerprint = ()

    def fits(self, batch: int, capacity: int, taps: tuple[int, ...], stamp: Fingerprint) -> bool:
        """Whether another request can use this state."""
        return (self.batch, self.taps, self.stamp) == (batch, taps, stamp) and capacity <= self.cache.span.capacity

    def reopen(self) -> None:
        """Begin again from nothing: what is masked is still multiplied, by zero, which NaN would survive."""
        self.lengths = [0] * self.batch
        self.cache.span.batch = self.batch
        self.cache.clear()

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """See :class:`specdiff.target.TargetState`."""
        span, width = self.cache.span, tokens.shape[1]
        needed = max(self.lengths) + width
        if needed > span.capacity:  # a conversation outgrows its first request: the buffers move
            self.recordings.clear()
        eager = head != "all" or width > WIDEST or needed > span.capacity
        if eager or not self.cache.rows_held():
            return super().forward(tokens, counts, head=head)
        view = min(bucket(needed), span.capacity)
        key = (len(self.lengths), width, view)
        start = upload(self.lengths, tokens.device)
        logits, taps = self.recordings(key, self._step(width, view), (tokens, start, counts))
        return Pass(logits, taps)

    def _step(self, width: int, view: int) -> Any:
        """The pass of ``width`` inputs per row over ``view`` columns, as a function of tensors alone."""

        def run(tokens: Tensor, start: Tensor, counts: Tensor) -> Outputs:
            self.cache.begin(start, [view - width] * start.shape[0], width)
            logits, tapped = self._run(tokens, counts, None)
            return logits.float(), tapped

        return run

    def close(self) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.give_back(self)


class GraphTarget(Target):
    """A target whose narrow passes are recorded. Same interface as :class:`specdiff.target.Target`.

    Args:
        model: the target, on one CUDA device, all of whose layers keep plain keys and values of the whole text.
        recorder: what records; None for CUDA graphs.

    Raises:
        UnsupportedError: the model does not fit, or its recorded passes differ from its own; says why.
    """

    name = "graphs"

    def __init__(self, model: PreTrainedModel, recorder: Recorder | None = None) -> None:
        super().__init__(model)
        self._lock = threading.Lock()
        self._idle: GraphState | None = None
        why = self._unfit(recorder is None)
        if why is not None:
            raise UnsupportedError(f"no graphs for {type(model).__name__}: {why}")
        self.recorder = recorder or CudaRecorder(self.device)
        try:
            check_state(self.call, self.open(2, 2 * LENGTH))
        except (RuntimeError, UnsupportedError) as error:
            reason = str(error) if isinstance(error, UnsupportedError) else f"a pass cannot be recorded: {error}"
            raise UnsupportedError(f"no graphs for {type(model).__name__}: {reason}") from error
        self._idle = None

    def _unfit(self, cuda: bool) -> str | None:
        if any(interferes(module) for module in self.model.modules()):
            return HOOKED
        devices = {parameter.device for parameter in self.model.parameters()}
        if cuda and {device.type for device in devices} != {"cuda"}:
            return "its weights are not on a CUDA device"
        if len(devices) > 1:
            return f"its weights are on {len(devices)} devices"
        if self.serving.mode != "ragged":
            return f"it is served {self.serving.words}"
        kinds = sorted({plan.word for plan in self.serving.plans} - {"full"})
        if kinds:
            return f"it has layers that do not keep the keys and values of the whole text ({', '.join(kinds)})"
        return None

    def refuses(self, capacity: int, seen: Fingerprint | None = None) -> str | None:
        """Why a request cannot be served so, or None; ``seen`` as in :meth:`specdiff.target.Target.open`."""
        hooks, *_ = fingerprint(self.model) if seen is None else seen
        return HOOKED if hooks else None

    def open(self, batch: int, capacity: int, taps: Sequence[int] = (), seen: Fingerprint | None = None) -> GraphState:
        """Start a request of ``batch`` rows that needs at most ``capacity`` columns; ``seen`` as in
        :meth:`specdiff.target.Target.open`."""
        seen = fingerprint(self.model) if seen is None else seen
        wanted, stamp = tuple(taps), (*seen, torch.is_inference_mode_enabled())
        with self._lock:
            state, self._idle = self._idle, None
        if state is not None and not state.fits(batch, capacity, wanted, stamp):
            state.recordings.clear()  # they hold it
            state = None
        if state is None:
            self._check_taps(wanted)
            state = GraphState(
                self.recorder, self.take_back, self.call, self.serving, batch, bucket(capacity), wanted,
                self.max_positions,
            )  # fmt: skip
            state.stamp = stamp
        state.reopen()
        return state

    def take_back(self, state: GraphState) -> None:
        """Keep a closed state for the next request; the one that waited is dropped."""
        dropped: GraphState | None = state
        if state.cache.rows_held() == state.batch:
            with self._lock:
                dropped, self._idle = self._idle, state
        if dropped is not None and dropped is not state:
            dropped.recordings.clear()
