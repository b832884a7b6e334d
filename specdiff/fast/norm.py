"""RMS norm for few rows on CPUs. Imports torch only, so drafters may use it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _constant(eps: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), eps, dtype=torch.float32, device="cpu")


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension of ``x``: ``float32[..., H]`` on the CPU; ``[..., 1]``."""
    length = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_constant(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fewer operators than ``F.rms_norm`` has on
    CPUs."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def scale(self, x: Tensor) -> Tensor:
        """``1 / sqrt(mean(x^2) + eps)``: ``[..., 1]``."""
        return inverse_rms(x, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., H]`` to the same shape."""
        return (x * self.scale(x)).mul_(self.weight)
