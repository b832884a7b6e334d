"""Peak memory of a piece of work, where the platform can say."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int | None:
    """Memory that ``work`` needed at its peak above what was in use before.

    On CUDA devices this is what torch allocated there; on Linux the process's resident memory (the kernel's high-water
    mark, reset before). None elsewhere. Resident memory counts whole pages and what the allocator keeps, so small
    differences mean nothing; run the work once beforehand.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        _give_back()
        _CLEAR.write_text("5")
        before_kib = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before_kib) * 1024
    except (OSError, KeyError):
        return None


def _give_back() -> None:
    """Return pages that freed objects had used, or the work would find them and need no new ones."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)
