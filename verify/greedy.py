"""Greedy verification: a drafted token is kept while it is the target's argmax."""

from __future__ import annotations

import torch
from torch import Tensor


def choices(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own tokens.

    Args:
        scores: ``[B, K+1, V]``; no softmax is taken.

    Returns:
        ``Long[B, K+1]`` argmax of every row, the lowest id of equals as ``torch.argmax``; and ``Bool[B, K+1]`` rows
        that have NaN, +inf or nothing but -inf.
    """
    tokens = torch.argmax(scores, dim=-1)
    top = scores.gather(-1, tokens[..., None])[..., 0]  # argmax takes NaN for the largest
    return tokens, ~torch.isfinite(top)
