"""How far a target pass is from the memory's limit: bytes of weights over measured bandwidth."""

from __future__ import annotations

import time
from typing import Any

import torch

from specdiff.target import Target
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.measure import synchronise

PROBE_BYTES = 1 << 28
"""Read to measure bandwidth; larger than any cache."""
REPEATS = 5


def roofline(cost: CostCurve, target: Target) -> dict[str, Any]:
    """The floor of a pass over one input, and what it took.

    Returns:
        ``weight_bytes``, ``bandwidth`` (bytes a second), ``floor_seconds``, ``pass_seconds`` and ``share``, the floor's
        part of the pass.
    """
    size, speed = target.weight_bytes(), bandwidth(target.device)
    floor, taken = size / speed, cost.target_at(1)
    return {
        "weight_bytes": size,
        "bandwidth": speed,
        "floor_seconds": floor,
        "pass_seconds": taken,
        "share": floor / taken,
    }


def bandwidth(device: torch.device, size: int = PROBE_BYTES) -> float:
    """Bytes a second of one reduction over ``size`` bytes, the best of a few."""
    data = torch.ones(size // 4, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        synchronise(device)
        began = time.perf_counter()
        data.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return size / best
