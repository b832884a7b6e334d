"""Which positions a step commits. Pure functions of scores; every row on its own; ties go to the left."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(score: Tensor, candidates: Tensor) -> Tensor:
    """``Long[A, W]`` 0 for the best candidate of the row, 1 for the next, ...; non-candidates come last."""
    key = torch.where(candidates, score.double(), -torch.inf)
    # -inf scores of candidates stay ahead of non-candidates
    key = torch.where(candidates, key.clamp(min=-1e300), key)
    order = torch.argsort(key, dim=-1, descending=True, stable=True)
    place = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def top(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The ``count``: ``Long[A]`` best candidates of each row."""
    return candidates & (ranks(score, candidates) < count[:, None])


def best(score: Tensor, candidates: Tensor) -> Tensor:
    """The single best candidate of each row."""
    return candidates & (ranks(score, candidates) == 0)


def above(score: Tensor, candidates: Tensor, threshold: float, strict: bool = False) -> Tensor:
    """All candidates that reach the threshold (``>`` if ``strict``), and the best one in any case."""
    reach = score > threshold if strict else score >= threshold
    return (candidates & reach) | best(score, candidates)


def above_or_quota(score: Tensor, candidates: Tensor, threshold: float, quota: Tensor) -> Tensor:
    """All above the threshold if they are at least ``quota``, otherwise the ``quota`` best (SDAR dynamic, LLaDA2.0)."""
    sure = candidates & (score > threshold)
    enough = sure.sum(-1) >= quota
    return torch.where(enough[:, None], sure, top(score, candidates, quota))


def factor_prefix(score: Tensor, candidates: Tensor, factor: float) -> Tensor:
    """Fast-dLLM's factor rule: the longest prefix of c_1 >= c_2 >= ... with ``c_i >= 1 - f / (i + 1)``; c_1 is free."""
    rank = ranks(score, candidates)
    ordered = torch.full_like(score, -torch.inf).scatter_(-1, rank, torch.where(candidates, score, -torch.inf))
    place = torch.arange(1, score.shape[-1] + 1, device=score.device)
    good = ordered >= 1.0 - factor / (place + 1)
    good[:, :1] = True
    count = good.long().cumprod(-1).sum(-1)
    return candidates & (rank < count[:, None])


def entropy_prefix(entropy: Tensor, candidates: Tensor, bound: float, own: bool = True) -> Tensor:
    """Candidates in ascending entropy while the running sum stays within ``bound``; at least one.

    Args:
        entropy: ``[A, W]`` nats.
        candidates: ``Bool[A, W]``.
        bound: nats.
        own: True counts the position's own entropy in the sum (SDAR); False leaves it out (entropy-bounded sampling,
            arXiv 2505.24857, as in DiffusionGemma).
    """
    big = torch.where(candidates, entropy, torch.inf)
    order = torch.argsort(big, dim=-1, stable=True)
    ordered = big.gather(-1, order)
    total = ordered.cumsum(-1)
    good = (total if own else total - ordered) <= bound
    good[:, :1] = True
    return candidates & torch.zeros_like(good).scatter_(-1, order, good)


def leftmost(candidates: Tensor, count: Tensor) -> Tensor:
    """The ``count``: ``Long[A]`` leftmost candidates."""
    return candidates & (candidates.long().cumsum(-1) <= count[:, None])


def leading(match: Tensor, candidates: Tensor) -> Tensor:
    """Candidates before the first one (left to right) that does not match; the first candidate always."""
    first = candidates & (candidates.long().cumsum(-1) == 1)
    return first | (candidates & ((match | ~candidates).long().cumprod(-1) == 1))
