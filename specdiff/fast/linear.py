"""Packed linear layers for CPUs: one weight, the fastest exact kernel for few rows on this machine.

A matrix product over 1 to 24 rows reads every weight once, so the kernel that reads least and wastes least wins. Three
are tried: plain ``F.linear``; oneDNN with the weight packed ahead; and FBGEMM with the weight stored in float16 and
the arithmetic in float32. The last halves the traffic and is used only for weights that float16 holds without any
rounding, perhaps after a power-of-two scale (bfloat16 checkpoints nearly always do), so that the product is that of
the float32 weights. Which one is best is measured, once per shape and process, in some milliseconds.

This module imports torch only, so drafters may use it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

MEASURED_ROWS = (1, 9, 17)
"""Row counts at which kernels are compared; their times are added."""
PREFERENCE = 1.3
"""How much longer the float16 kernel may take and still be chosen: it is measured with its weight in the cache, where
reading half as much counts for less than in a whole model."""
_SLICE = 4096
"""Output rows of the matrix that stands for larger ones while measuring."""
_HINT = 16
"""Row count given to oneDNN when it picks a weight layout. Packing for 1 row is slower even at 1 row."""


class PackedLinear(Protocol):
    """``y = x W^T + b`` for ``x``: ``float32[N, in]``."""

    kernel: str
    """``plain``, ``onednn`` or ``half``."""
    nbytes: int
    """Of the weight as it is stored."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        ...


class Plain:
    """``F.linear``: any device, any dtype."""

    kernel = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.nbytes = weight, bias, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        return F.linear(x, self.weight, self.bias)


class OneDnn:
    """oneDNN with the weight in its blocked layout, float32."""

    kernel = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)
        self.bias, self.nbytes = bias, weight.nbytes
        self.run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        return self.run(x, self.packed, self.bias, "none", [], "")


class Half:
    """FBGEMM: float16 storage, float32 arithmetic. ``weight`` times ``2**exponent`` must be exact in float16."""

    kernel = "half"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exponent: int = 0) -> None:
        scale = 2.0**exponent
        self.packed = torch.ops.quantized.linear_prepack_fp16(
            weight * scale if exponent else weight, bias * scale if bias is not None and exponent else bias
        )
        self.nbytes = 2 * weight.numel()
        self.back = 1.0 / scale if exponent else None
        operator = torch.ops.quantized.linear_dynamic_fp16.default
        self.run = getattr(operator, "_op", operator)  # spares microseconds of Python checks for traced arguments

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, in]`` to ``[N, out]``."""
        y = self.run(x, self.packed)
        return y if self.back is None else y.mul_(self.back)


def half_exponent(weight: Tensor) -> int | None:
    """The smallest power of two by which ``weight`` becomes exact in float16, or None when there is none.

    ``weight``: float32, any shape. 0 means that the weight round-trips as it is. Otherwise the largest scale that does
    not overflow is tried, because it keeps the most small values.
    """
    if _exact(weight):
        return 0
    peak = float(weight.abs().max())
    if not math.isfinite(peak):
        return None
    exponent = math.floor(math.log2(65504.0 / peak))
    return exponent if exponent > 0 and _exact(weight * 2.0**exponent) else None


def _exact(weight: Tensor) -> bool:
    return torch.equal(weight.half().float(), weight)


def pack(weight: Tensor, bias: Tensor | None = None, *, kernel: str | None = None, exact: bool = True) -> PackedLinear:
    """A callable that computes ``x W^T + b`` with the fastest kernel for few rows.

    Args:
        weight: ``[out, in]``. Only float32 on the CPU is packed (a copy); anything else runs as ``F.linear`` on it.
        bias: ``[out]`` or None.
        kernel: ``plain``, ``onednn`` or ``half`` instead of the measured choice.
        exact: False lets ``half`` round the weight to float16 (for a drafter, whose law is whatever it computes).

    Raises:
        ValueError: ``kernel`` cannot serve this weight exactly, or is unknown.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return Plain(weight, bias)
    exponent = half_exponent(weight)
    if exponent is None and not exact and float(weight.abs().max()) < 65504.0:
        exponent = 0
    if kernel is None:
        shape = (min(weight.shape[0], _SLICE), weight.shape[1])
        kernel = fastest(*shape, exponent is not None, torch.get_num_threads())
    if kernel == "half":
        if exponent is None:
            raise ValueError("this weight is not exact in float16, so the kernel 'half' cannot hold it")
        return Half(weight, bias, exponent)
    if kernel == "onednn":
        return OneDnn(weight, bias)
    if kernel == "plain":
        return Plain(weight, bias)
    raise ValueError(f"kernel must be 'plain', 'onednn' or 'half', not {kernel!r}")


@functools.lru_cache(maxsize=256)
def fastest(out_features: int, in_features: int, half: bool, threads: int) -> str:
    """Which kernel is fastest here for a matrix of this shape, by time added over :data:`MEASURED_ROWS`.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        half: whether float16 storage is allowed.
        threads: torch's thread count (part of the memory of past measurements).
    """
    weight = torch.linspace(-1, 1, out_features * in_features).half().float().view(out_features, in_features)
    makers: dict[str, Callable[[Tensor], PackedLinear]] = {"half": Half, "onednn": OneDnn, "plain": Plain}
    if not half:
        del makers["half"]
    layers: dict[str, PackedLinear] = {}
    with torch.no_grad():
        inputs = [torch.ones(rows, in_features, dtype=torch.float32) for rows in MEASURED_ROWS]
        for name, make in makers.items():
            try:
                layers[name] = make(weight)
                layers[name](inputs[0])
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                layers.pop(name, None)
                log.debug("linear kernel %s is not available here: %s", name, error)
        times = dict.fromkeys(layers, 0.0)
        for x in inputs:
            for name, seconds in _best_times(layers, x).items():
                times[name] += seconds
    best = min(times, key=lambda name: times[name] * (1.0 if name == "half" else PREFERENCE))
    log.debug("linear %dx%d on %d threads: %s of %s", out_features, in_features, threads, best, times)
    return best


def _best_times(layers: dict[str, PackedLinear], x: Tensor, repeats: int = 9) -> dict[str, float]:
    """Shortest of a few interleaved runs of each layer, in seconds."""
    best = dict.fromkeys(layers, math.inf)
    for _ in range(repeats):
        for name, layer in layers.items():
            began = time.perf_counter()
            layer(x)
            best[name] = min(best[name], time.perf_counter() - began)
    return best
