"""Steps of fixed shapes, recorded once and replayed: what CUDA graphs are used for.

A recording repeats the very operators of one run of a function, on the same memory and with the same Python numbers in
them. So a function may be recorded only if everything that differs from call to call reaches it through the contents of
its tensors: shapes, branches and slices that depend on the data would be frozen, and a value read on the host cannot
be recorded at all. What a recorded function writes in place it must write again in the same way when it runs twice.

This module imports torch only, so drafters may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]

KEPT, KEPT_BYTES = 64, 1 << 30
"""Recordings that one owner keeps, and bytes of their results; what was not used for the longest time goes first."""
WARM_UPS = 2
"""Runs on a side stream before a capture: libraries set themselves up in the first one."""


class Recording(Protocol):
    """One recorded run."""

    def replay(self) -> Outputs:
        """Run it again; the tensors that it gives are overwritten by the next replay."""
        ...


class Recorder(Protocol):
    """Records runs. Recordings of one recorder may share memory: who records or replays holds its lock."""

    lock: threading.RLock

    def __call__(self, step: Callable[[], Outputs]) -> Recording:
        """Record ``step``, which is run at least once.

        Raises:
            RuntimeError: it waits for the device, or does something else that cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, all in one pool of memory.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._pool = torch.cuda.MemPool()  # lives on while no graph does

    def __call__(self, step: Callable[[], Outputs]) -> Recording:
        """Warm up on a side stream, waiting forbidden in the last run; then capture."""
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            pool: Any = self._pool.id
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS - 1):
                    step()
                with _waiting_forbidden():
                    step()
                side.synchronize()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = step()
                finally:
                    graph.capture_end()
            current.wait_stream(side)
        return _CudaRecording(graph, outputs)


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Calls that wait for the device raise RuntimeError: inside a capture they would leave it broken."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph, self._outputs = graph, outputs

    def replay(self) -> Outputs:
        """See :class:`Recording`."""
        self._graph.replay()
        return self._outputs


class RecordedStep:
    """A function of tensors that runs as a recording.

    Attributes:
        nbytes: of its results, which the recording keeps.

    Args:
        recorder: makes the recording, at once.
        run: the function, called with tensors that stay at their place.
        inputs: tensors of the shapes, dtypes and device that all later inputs have.
    """

    def __init__(self, recorder: Recorder, run: Callable[..., Outputs], inputs: Sequence[Tensor]) -> None:
        self._lock, self._run = recorder.lock, run  # what the run reads must live as long as its recording
        self._held = [tensor.clone() for tensor in inputs]
        with self._lock:
            self._recording = recorder(lambda: self._run(*self._held))
        self.nbytes = 0

    def __call__(self, *inputs: Tensor) -> Outputs:
        """The function's results for ``inputs``, in tensors of their own."""
        with self._lock:
            for held, new in zip(self._held, inputs, strict=True):
                held.copy_(new)
            outputs = tuple(None if tensor is None else tensor.clone() for tensor in self._recording.replay())
        self.nbytes = sum(tensor.nbytes for tensor in outputs if tensor is not None)
        return outputs


class Recordings:
    """Recorded steps by key. Keys of one call differ in shapes alone, so the last ones used are kept.

    Args:
        recorder: makes them; None while nothing is recorded.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self._steps: dict[Hashable, RecordedStep] = {}

    def __call__(self, key: Hashable, run: Callable[..., Outputs], inputs: Sequence[Tensor]) -> Outputs:
        """``run(*inputs)``, recorded when ``key`` is new."""
        step = self._steps.pop(key, None)
        if step is None:
            assert self.recorder is not None
            while len(self._steps) >= KEPT or sum(kept.nbytes for kept in self._steps.values()) > KEPT_BYTES:
                self._steps.pop(next(iter(self._steps)))
            step = RecordedStep(self.recorder, run, inputs)
        self._steps[key] = step
        return step(*inputs)

    def clear(self) -> None:
        """Forget all of them: what they wrote to has moved."""
        self._steps = {}


def bucket(length: int) -> int:
    """The least of 256, 384, 512, 768, 1024, 1536, ... that holds ``length``: at most half is read in vain."""
    size = 256
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
