"""Losses over drafted slots, and the weights of the slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Variation:
    """The target's law of N slots, for the total-variation distance.

    Attributes:
        law: ``[N, k]`` probabilities of the stored tokens, those outside the draft vocabulary included.
        known: ``Bool[N, k]`` which of them the draft vocabulary holds.
        share: weight of the distance.
    """

    law: Tensor
    known: Tensor
    share: float


class _LinearSoftTarget(torch.autograd.Function):
    """Losses of a frozen linear head against sparse targets, in chunks: no ``[N, V]`` tensor is kept."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, ids: Tensor, probs: Tensor, variation: Variation | None, chunk: int
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
            drafted = (picked - lse[:, None]).exp()
            chosen[part] = drafted[:, 0]
            # the gradient by logit i is q_i * scale, and on the target's tokens an offset beside it
            scale, offset = mass, -p
            if variation is not None:
                known = variation.known[part]
                distance, pull, lean = total_variation(drafted, variation.law[part], known)
                loss[part] += variation.share * distance
                scale = scale + variation.share * lean
                offset = offset + variation.share * pull
            logits *= (scale / total)[:, None]
            logits.scatter_add_(1, target_ids, offset)
            grad[part] = logits.to(head.dtype) @ head
        ctx.save_for_backward(grad)
        ctx.dtype = states.dtype
        ctx.mark_non_differentiable(best, chosen)
        return loss, best, chosen

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * upstream[:, None]).to(ctx.dtype), None, None, None, None, None


def linear_soft_target_loss(
    states: Tensor, head: Tensor, ids: Tensor, probs: Tensor, variation: Variation | None = None, chunk: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """``sum_j p_nj (lse_n - logit_n[id_nj])`` of each slot n, with ``logits = states head^T``.

    That is KL(target || drafter) plus a constant where ``p`` is the target's law, and cross-entropy where it is
    one-hot. Memory is O(chunk x V); the head gets no gradient.

    Args:
        states: ``[N, H]`` normed states.
        head: ``[V, H]`` frozen output rows.
        ids: ``Long[N, k]`` draft-vocabulary columns of the target's tokens; for tokens outside the draft vocabulary any
            column with probability 0.
        probs: ``[N, k]`` their weights.
        variation: adds ``share`` times the distance of :func:`total_variation`.
        chunk: slots per step.

    Returns:
        ``[N]`` losses; ``Long[N]`` the drafter's argmax columns; ``[N]`` the probability that it gives to the first
        target (the last two without gradient).
    """
    return _LinearSoftTarget.apply(states, head, ids, probs, variation, chunk)


def total_variation(drafted: Tensor, law: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation between the drafter's law q and what is stored of the target's law p, and its gradient.

    ``TV = 1/2 (sum_j |p_j - q_j| + |p_rest - q_rest|)``: a bin for each stored token, and one for all others. A stored
    token outside the draft vocabulary has q_j = 0. This is half the L1 distance: 1 - TV is the chance that speculative
    sampling accepts a token of q, were all others one token.

    Args:
        drafted: ``[N, k]`` q of the stored tokens.
        law: ``[N, k]`` p of them.
        known: ``Bool[N, k]`` which of them the draft vocabulary holds.

    Returns:
        ``[N]`` the distance; the gradient by logit, which is ``q_i * lean`` and on the stored tokens ``pull`` more:
        ``[N, k]`` pull, ``[N]`` lean.
    """
    q = drafted * known
    rest = (1 - q.sum(-1)) - (1 - law.sum(-1)).clamp(min=0)
    distance = 0.5 * ((law - q).abs().sum(-1) + rest.abs())
    sign, rest_sign = 0.5 * (q - law).sign() * known, 0.5 * rest.sign()
    lean = rest_sign - (sign * q).sum(-1) - rest_sign * (1 - q.sum(-1))
    return distance, q * (sign - rest_sign[:, None]), lean


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
