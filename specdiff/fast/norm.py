"""RMS norm for few rows on CPUs. Imports torch only, so drafters may use it."""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fewer operators than ``F.rms_norm`` has on
    CPUs."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = torch.tensor([eps])
        self.inverse = 1.0 / weight.shape[-1]

    def scale(self, x: Tensor) -> Tensor:
        """``1 / sqrt(mean(x^2) + eps)``: ``[..., 1]``."""
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.addcmul(self.eps, length, length, value=self.inverse).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., H]`` to the same shape."""
        return (x * self.scale(x)).mul_(self.weight)
