"""Token-wise verification: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).

Token i is kept with probability ``min(1, p_i(x_i) / q_i(x_i))``; the first one that fails is replaced by a draw from
``norm((p_i - q_i)+)``. If none fails, one more token is drawn from ``p_{K+1}``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.verify.draw import next_weights
from specdiff.verify.prepare import Prepared, leading


def thresholds(block: Prepared) -> Tensor:
    """``[B, K]``: token i passes its test if ``u_i < h_i``. 0 past the row's length."""
    return block.ratio.clamp(max=1.0)


def accepted(passed: Tensor) -> Tensor:
    """``Long[B]`` kept tokens: those before the first failed test. ``passed``: ``Bool[B, K]``."""
    return leading(passed)


def weights(block: Prepared, kept: Tensor) -> Tensor:
    """``[B, V]`` unnormalised law of the token after ``kept``: ``Long[B]`` accepted ones."""
    return next_weights(block, kept, torch.ones_like(block.prefix[:, 0]))
