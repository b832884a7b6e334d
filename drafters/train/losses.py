"""Losses over drafted slots, and the weights of the slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _LinearSoftTarget(torch.autograd.Function):
    """Cross-entropy of a frozen linear head against sparse soft targets, in chunks: no ``[N, V]`` tensor is kept."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.empty_like(states, dtype=torch.float32)
        loss = torch.empty(len(states), device=states.device)
        best = torch.empty(len(states), dtype=torch.long, device=states.device)
        chosen = torch.empty(len(states), device=states.device)
        for i in range(0, len(states), chunk):
            part = slice(i, i + chunk)
            logits = (states[part].to(head.dtype) @ head.T).float()
            target_ids, p = ids[part], probs[part]
            picked = logits.gather(1, target_ids)
            top, best[part] = logits.max(-1)
            logits -= top[:, None]
            logits.exp_()
            total = logits.sum(-1)
            lse = total.log() + top
            mass = p.sum(-1)
            loss[part] = lse * mass - (p * picked).sum(-1)
            chosen[part] = (picked[:, 0] - lse).exp()
            logits *= (mass / total)[:, None]
            logits.scatter_add_(1, target_ids, -p)
            logits *= weights[part][:, None]
            grad[part] = logits.to(head.dtype) @ head
        ctx.save_for_backward(grad)
        ctx.dtype = states.dtype
        ctx.mark_non_differentiable(best, chosen)
        return (loss * weights).sum(), best, chosen

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * upstream).to(ctx.dtype), None, None, None, None, None


def linear_soft_target_loss(
    states: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, chunk: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """``sum_n w_n sum_j p_nj (lse_n - logit_n[id_nj])`` with ``logits = states head^T``.

    That is KL(target || drafter) plus a constant where ``p`` is the target's law, and cross-entropy where it is
    one-hot. Memory is O(chunk x V); the head gets no gradient.

    Args:
        states: ``[N, H]`` normed states.
        head: ``[V, H]`` frozen output rows.
        ids: ``Long[N, k]`` draft-vocabulary columns of the target's tokens; for tokens outside the draft vocabulary any
            column with probability 0.
        probs: ``[N, k]`` their weights.
        weights: ``[N]`` weight of each slot.
        chunk: slots per step.

    Returns:
        The loss; ``Long[N]`` the drafter's argmax columns; ``[N]`` the probability that it gives to the first target.
    """
    return _LinearSoftTarget.apply(states, head, ids, probs, weights, chunk)


def decay_weights(slots: int, gamma: float) -> Tensor:
    """``exp(-(k - 1) / gamma)`` for slot k = 1..slots (DFlash)."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32) / gamma)


def dpace_weights(probability: Tensor, floor: float = 0.5) -> Tensor:
    """D-PACE: a slot weighs as much as the expected accepted length depends on it.

    ``q' = (1 - floor) q + floor``, ``w_j = sum_{m >= j} prod_{i <= m} q'_i``, without gradient.

    Args:
        probability: ``[..., K]`` probability of each slot's target token under the drafter.
        floor: keeps late slots alive early in training.
    """
    smooth = probability.detach().float() * (1 - floor) + floor
    reach = smooth.cumprod(-1)
    return reach.flip(-1).cumsum(-1).flip(-1)
