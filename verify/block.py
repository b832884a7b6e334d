r"""Block verification: Sun et al., ICLR 2025 (arXiv:2403.10444). Never keeps fewer tokens than token-wise, in law.

With ``P_0 = 1``, a row's own length ``L`` and independent uniforms ``u_i``::

    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))                        i = 1..L
    S_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+
    h_i = S_i / (S_i + 1 - P_i)   for i < L,      h_L = P_L          (0 / 0 = 1)
    accepted = max{i : u_i < h_i}, 0 if there is none
    next ~ p_{L+1} if accepted = L, else norm((P_acc p_{acc+1} - q_{acc+1})+)

A token with a one-hot ``q`` (Delta) gives ``P_i = P_{i-1} p_i(x_i)`` and ``S_{i-1} = P_{i-1} (1 - p_i(x_i))``, and the
two kinds may be mixed: given everything drawn so far, ``P(accepted >= i) = P_i`` holds for any ``q_{i+1}`` that is the
law of ``x_{i+1}`` under what has been revealed before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdiff.verify.draw import next_weights
from specdiff.verify.prepare import Prepared


def thresholds(block: Prepared) -> Tensor:
    """``[B, K]``: ``h_1 .. h_K``; 0 past the row's length. ``block.mass`` must have been computed."""
    through = block.prefix[:, 1:]
    if through.shape[1] == 0:
        return through
    assert block.mass is not None, "block verification needs prepare(..., residual_mass=True)"
    following = pad(block.mass[:, 1:], (0, 1))
    denominator = following + (1 - through)
    inner = torch.where(denominator > 0, following / denominator, 1.0)
    slots = torch.arange(1, through.shape[1] + 1, device=through.device)
    lengths = block.lengths[:, None]
    return torch.where(slots == lengths, through, torch.where(slots < lengths, inner, 0.0))


def accepted(passed: Tensor) -> Tensor:
    """``Long[B]`` kept tokens: up to the last passed test. ``passed``: ``Bool[B, K]``."""
    slots = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return pad(passed * slots, (1, 0)).amax(dim=1)


def weights(block: Prepared, kept: Tensor) -> Tensor:
    """``[B, V]`` unnormalised law of the token after ``kept``: ``Long[B]`` accepted ones."""
    return next_weights(block, kept, block.prefix.gather(1, kept[:, None])[:, 0])
