"""Drawing: the exponential race, and what is left of a target row after a rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.verify.laws import Sampled
from specdiff.verify.prepare import Prepared, compute_dtype, draft_row


def race(weights: Tensor, exponential: Tensor) -> Tensor:
    """Draw from unnormalised ``weights``: the winner of ``argmin(E / w)`` has law ``w / sum(w)``.

    Computed as ``argmax(w / E)``, so that a zero weight never wins while any weight is positive. With the same ``E``
    for two sets of weights this is the Gumbel coupling (``-log E`` is Gumbel noise).

    Args:
        weights: ``[..., V]`` at least 0, scaled so that the largest is not tiny (probabilities are fine).
        exponential: ``[..., V]`` standard exponentials, all positive.

    Returns:
        ``Long[...]`` ids; the lowest of equals. A row of NaN gives some id below V.
    """
    return torch.argmax(weights / exponential, dim=-1)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[b, index[b]]`` for each b. ``rows``: ``[B, N, V]``; ``index``: ``Long[B]``; returns ``[B, V]``."""
    batch, count, width = rows.shape
    flat = torch.arange(batch, device=rows.device) * count + index
    return rows.reshape(batch * count, width).index_select(0, flat)


def next_weights(block: Prepared, accepted: Tensor, scale: Tensor) -> Tensor:
    """Weights of the token that follows ``accepted`` drafted ones.

    ``p`` at the end of the row's proposal, else ``(scale * p - q)+``, which for a one-hot ``q`` is ``p`` without the
    rejected token. Where rounding leaves nothing of it (``p = q``: this has no probability), ``p``.

    Args:
        block: the prepared block.
        accepted: ``Long[B]`` tokens kept, at most ``block.lengths``.
        scale: ``[B]`` factor of ``p``, in [0, 1].

    Returns:
        ``[B, V]`` unnormalised, largest entry 1; NaN where the target row is broken.
    """
    scores, proposal = block.scores, block.proposal
    dtype = compute_dtype(scores)
    weights = torch.softmax(pick(scores, accepted), dim=-1, dtype=dtype)
    if proposal.block:
        rejected = accepted < block.lengths
        slot = accepted.clamp(max=proposal.block - 1)[:, None]
        token = block.tokens.gather(1, slot)
        one_hot = block.delta.gather(1, slot)
        kept = weights.gather(1, token)
        removed = torch.where(one_hot & block.known.gather(1, slot), torch.zeros_like(kept), kept)
        rest = weights.scatter(1, token, removed)
        if proposal.law == Sampled() and proposal.logits is not None:
            draft, _ = draft_row(pick(proposal.logits, slot[:, 0]), proposal.draft_ids, scores.shape[-1], dtype)
            rest = torch.where(one_hot, rest, (weights * scale[:, None]).sub_(draft).clamp_(min=0))
        some = (rest.amax(dim=1) > 0) & rejected
        weights = torch.where(some[:, None], rest, weights)
    return weights / weights.amax(dim=1, keepdim=True)
