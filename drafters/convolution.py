"""DFlash 2's dynamic causal convolution inside the block: slots mix with the few slots before them.

For slot s, channel c in group g, side i (0 before the sublayer, 1 after it), with x the sublayer's normalised input:

    y_s[c] = sum_t (base[i, t, c] + delta_s[i, t, g]) z_{s-t}[c],   delta_s = P x_s,   z = 0 before the block

The kernel starts as the identity (base: one at t = 0, P: zero). Both sides take their dynamic part from the same ``x``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DynamicConvolution(nn.Module):
    """The pair of convolutions around one sublayer; parameter names as in the DFlash 2 layout.

    Args:
        hidden: width H.
        kernel: taps k.
        group: channels that share a dynamic kernel; must divide H.
    """

    def __init__(self, hidden: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group, self.groups = kernel, group, hidden // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * self.groups, bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input ``[..., S, H]``, and what :meth:`after` needs: ``[..., S, k, H / group]``."""
        delta = self.kernel_projection(x).view(*x.shape[:-1], 2, self.kernel, self.groups)
        return self._convolve(x, delta[..., 0, :, :], 0), delta[..., 1, :, :]

    def after(self, y: Tensor, delta: Tensor) -> Tensor:
        """The sublayer's output ``[..., S, H]``, convolved."""
        return self._convolve(y, delta, 1)

    def _convolve(self, z: Tensor, delta: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(z)
        for tap in range(self.kernel):
            weight = self.base_kernel[side, tap].to(z.dtype) + delta[..., tap, :].repeat_interleave(self.group, -1)
            out = out + weight * F.pad(z, (0, 0, tap, 0))[..., : z.shape[-2], :]
        return out
