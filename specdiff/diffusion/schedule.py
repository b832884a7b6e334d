"""Schedules: the share of masks over time, tokens per step, temperature per step. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def even_quota(initial: Tensor, steps: Tensor, step: Tensor) -> Tensor:
    """LLaDA's quota ``n // S + (i < n % S)`` (Nie et al. 2025), at least one.

    Args:
        initial: ``Long[A]`` masks ``n`` at the start of the block.
        steps: ``Long[A]`` steps ``S`` granted; more than ``n`` count as ``n``.
        step: ``Long[A]`` step ``i``, from 0.
    """
    steps = torch.minimum(steps.clamp(min=1), initial.clamp(min=1))
    return (torch.div(initial, steps, rounding_mode="floor") + (step < initial % steps)).clamp(min=1)


def dream_times(steps: Tensor, step: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``t_i`` and ``t_{i+1}`` of Dream's grid from 1 to ``eps`` in ``steps`` equal steps (float64)."""
    width = (1.0 - eps) / steps.clamp(min=1).double()
    return 1.0 - width * step, 1.0 - width * (step + 1)


def dream_quota(masks: Tensor, steps: Tensor, step: Tensor, eps: float) -> Tensor:
    """Dream's ``int(n_masks (1 - s/t))`` per row; all that remain at the last step; at least one."""
    t, s = dream_times(steps, step, eps)
    quota = (masks.double() * (1.0 - s / t)).long()
    return torch.where(step >= steps - 1, masks, quota).clamp(min=1)


def alpha_linear(t: Tensor) -> Tensor:
    """The share of clean tokens ``alpha(t) = 1 - t``."""
    return 1.0 - t


def unmask_probability(alpha_t: Tensor, alpha_s: Tensor) -> Tensor:
    """Chance that a mask at time ``t`` is decided by ``s < t``: ``(alpha_s - alpha_t) / (1 - alpha_t)``."""
    return (alpha_s - alpha_t) / (1.0 - alpha_t).clamp(min=1e-300)


def block_steps(total: int, blocks: Tensor, block: Tensor) -> Tensor:
    """``Long[A]`` steps of block number ``block`` when ``total`` are shared out; the first ones get one more."""
    blocks = blocks.clamp(min=1)
    return (torch.div(total, blocks, rounding_mode="floor") + (block < total % blocks).long()).clamp(min=1)


def falling_temperature(steps: Tensor, step: Tensor, low: float, high: float) -> Tensor:
    """DiffusionGemma's ``low + (high - low) n / N`` with ``n`` falling from ``N`` to 1.

    Computed in float32 in the order of Hugging Face's processor, so that logits agree to the bit.
    """
    left = (steps - step).to(torch.int32)
    return low + ((high - low) * (left / steps.to(torch.float32)))
