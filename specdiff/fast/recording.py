"""Steps of fixed shapes, recorded once and replayed: what CUDA graphs are used for.

A recording repeats the very operators of one run of a function, on the same memory and with the same Python numbers in
them. So a function may be recorded only if everything that differs from call to call reaches it through the contents of
its tensors: shapes, branches and slices that depend on the data would be frozen, and a value read on the host cannot
be recorded at all. What a recorded function writes in place it must write again in the same way when it runs twice.

This module imports torch only, so drafters may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]

KEPT = 64
"""Recordings that one owner keeps; the oldest goes first."""
WARM_UPS = 2
"""Runs on a side stream before a capture: libraries set themselves up in the first one."""


class Recording(Protocol):
    """One recorded run."""

    def replay(self) -> Outputs:
        """Run it again; the tensors that it gives are overwritten by the next replay."""
        ...


class Recorder(Protocol):
    """Records runs."""

    def __call__(self, step: Callable[[], Outputs]) -> Recording:
        """Record ``step``, which is run at least once.

        Raises:
            RuntimeError: it waits for the device, or does something else that cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs. Those of one recorder share their memory, so they must not run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Callable[[], Outputs]) -> Recording:
        """Warm up on a side stream, then capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step()
        self._pool = graph.pool()
        return _CudaRecording(graph, outputs)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph, self._outputs = graph, outputs

    def replay(self) -> Outputs:
        """See :class:`Recording`."""
        self._graph.replay()
        return self._outputs


class RecordedStep:
    """A function of tensors that runs as a recording.

    Args:
        recorder: makes the recording, at once.
        run: the function, called with tensors that stay at their place.
        inputs: tensors of the shapes, dtypes and device that all later inputs have.
    """

    def __init__(self, recorder: Recorder, run: Callable[..., Outputs], inputs: Sequence[Tensor]) -> None:
        self._held = [tensor.clone() for tensor in inputs]
        self._recording = recorder(lambda: run(*self._held))

    def __call__(self, *inputs: Tensor) -> Outputs:
        """The function's results for ``inputs``, in tensors of their own."""
        for held, new in zip(self._held, inputs, strict=True):
            held.copy_(new)
        return tuple(None if tensor is None else tensor.clone() for tensor in self._recording.replay())


class Recordings:
    """Recorded steps by key. Keys of one call differ in shapes or addresses alone, so the last few are kept.

    Args:
        recorder: makes them; None while nothing is recorded.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self._steps: dict[Hashable, RecordedStep] = {}

    def __call__(self, key: Hashable, run: Callable[..., Outputs], inputs: Sequence[Tensor]) -> Outputs:
        """``run(*inputs)``, recorded when ``key`` is new."""
        if key not in self._steps:
            assert self.recorder is not None
            while len(self._steps) >= KEPT:
                self._steps.pop(next(iter(self._steps)))
            self._steps[key] = RecordedStep(self.recorder, run, inputs)
        return self._steps[key](*inputs)

    def clear(self) -> None:
        """Forget all of them: what they wrote to has moved."""
        self._steps = {}


def bucket(length: int) -> int:
    """The least of 256, 384, 512, 768, 1024, 1536, ... that holds ``length``: at most half is read in vain."""
    size = 256
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
