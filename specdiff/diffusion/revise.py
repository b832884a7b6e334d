"""Taking back or changing what was committed. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.diffusion.select import ranks


def edits(tokens: Tensor, proposed: Tensor, score: Tensor, editable: Tensor, threshold: float) -> Tensor:
    """Committed positions that LLaDA2.1's token editing overwrites: ``p > threshold`` and another token proposed."""
    return editable & (score > threshold) & (proposed != tokens)


def lowest(confidence: Tensor, editable: Tensor, count: Tensor) -> Tensor:
    """The ``count``: ``Long[A]`` least confident editable positions (Mask-Predict, Ghazvininejad et al. 2019)."""
    return editable & (ranks(-confidence, editable) < count[:, None])


def sigma_max(alpha_t: Tensor, alpha_s: Tensor) -> Tensor:
    """ReMDM's bound on the remasking chance: ``min(1, (1 - alpha_s) / alpha_t)`` (Wang et al. 2025, eq. 4)."""
    return ((1.0 - alpha_s) / alpha_t.clamp(min=1e-12)).clamp(max=1.0)


def remdm_sigma(
    kind: str, alpha_t: Tensor, alpha_s: Tensor, confidence: Tensor, committed: Tensor, cap: float, scale: float
) -> Tensor:
    """ReMDM's remasking chance per position.

    Args:
        kind: "cap", "rescale" or "conf".
        alpha_t: float64 ``[A]`` clean share now.
        alpha_s: float64 ``[A]`` clean share after the step.
        confidence: ``[A, W]`` probability at commit.
        committed: ``Bool[A, W]`` positions that may be remasked.
        cap: bound of "cap".
        scale: factor of "rescale".
    """
    most = sigma_max(alpha_t, alpha_s)[:, None]
    if kind == "cap":
        sigma = most.clamp(max=cap).expand(confidence.shape)
    elif kind == "rescale":
        sigma = (most * scale).expand(confidence.shape)
    else:
        weight = torch.softmax(torch.where(committed, -confidence.double(), -torch.inf), -1).nan_to_num(0.0)
        sigma = most * weight
    return torch.where(committed, sigma, 0.0)


def remdm_unmask(alpha_t: Tensor, alpha_s: Tensor, sigma: Tensor) -> Tensor:
    """Chance that a mask is decided: ``(alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)``."""
    return ((alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t).clamp(min=1e-12)).clamp(0.0, 1.0)
