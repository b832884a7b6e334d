"""In what precision the training pass runs: what is faster here, measured."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator

ROWS, WIDTH = 256, 512
"""Size of the product that is timed."""
REPEATS = 5


def accelerator_for(precision: str, device: torch.device) -> Accelerator:
    """Processes and precision (``"bf16"``, ``"no"`` or ``"auto"``) of a run whose target is on ``device``."""
    return Accelerator(mixed_precision=choose(precision, device), cpu=device.type == "cpu")


def choose(precision: str, device: torch.device) -> str:
    """``"bf16"`` or ``"no"`` for accelerate. ``"auto"`` takes bfloat16 where it is at least as fast as float32.

    Recent GPUs and CPUs with bfloat16 units are; a CPU without them computes bfloat16 several times slower.
    """
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if seconds(torch.bfloat16, device) <= seconds(torch.float32, device) else "no"


def seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Best time of a matrix product."""
    a = torch.ones(ROWS, WIDTH, dtype=dtype, device=device)
    b = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return best
