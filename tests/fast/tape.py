"""A stand-in for CUDA graphs on the CPU: operators of one run, written down and repeated as they were."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

HOST_READS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "_unique2",
    "masked_select",
    "is_nonzero",
    "lift_fresh",
)
"""Operators that a stream cannot be captured with: the host waits for what they give, or gives values of its own."""


class Writing(TorchDispatchMode):
    """Writes down every operator with its arguments: tensors by identity, Python numbers as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket._qualified_op_name.split("::")[-1] in HOST_READS:
            raise RuntimeError(f"operation not permitted while recording: {func}")
        out = func(*args, **(kwargs or {}))
        self.lines.append((func, args, kwargs or {}, out))
        return out


class Recording:
    def __init__(self, lines: list[Any], outputs: tuple[Tensor | None, ...]) -> None:
        self.lines, self.outputs = lines, outputs
        self.replays = 0

    def replay(self) -> tuple[Tensor | None, ...]:
        self.replays += 1
        made: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, Tensor) else value

        with torch.no_grad():
            for func, args, kwargs, out in self.lines:
                new = func(*tree_map(now, args), **tree_map(now, kwargs))
                for old, fresh in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(old, Tensor):
                        made[id(old)] = fresh
        return tuple(now(tensor) for tensor in self.outputs)


class Tape:
    """Records as :class:`specdiff.fast.recording.CudaRecorder` does: runs twice beforehand, then captures."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recordings: list[Recording] = []

    def __call__(self, step: Any) -> Recording:
        for _ in range(2):
            step()
        with Writing() as writing:
            outputs = step()
        self.recordings.append(Recording(writing.lines, outputs))
        return self.recordings[-1]

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in self.recordings)
