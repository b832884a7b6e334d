"""What the ratio rules (token, block) need to know about a block, computed once.

Everything is batched and ragged: row ``b`` has its own length ``L_b``, and nothing past it has any influence. Nothing
here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdiff.verify.laws import Proposal, Sampled


@dataclass(eq=False)
class Prepared:
    """A block ready to be tested. ``V`` is the width of the target's scores.

    Attributes:
        scores: ``[B, K+1, V]`` the target's warped logits, as given.
        proposal: the proposal, as given.
        tokens: ``Long[B, K]`` drafted ids, clamped into the vocabulary.
        known: ``Bool[B, K]`` the drafted id lies inside the target's vocabulary (else ``p(x) = 0``).
        delta: ``Bool[B, K]`` the token is tested with a one-hot ``q``.
        lengths: ``Long[B]`` number L of tokens that can be tested, see :func:`prepare`.
        ratio: ``[B, K]`` ``p_i(x_i) / q_i(x_i)``, 0 past L.
        prefix: ``[B, K+1]`` ``P_0 .. P_K`` of block verification: ``P_i = min(1, P_{i-1} ratio_i)``, 0 past L.
        mass: ``[B, K]`` ``S_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+`` for i = 0 .. K-1, undefined past L, or None.
        broken: ``Bool[B, K+1]`` target rows with NaN, +inf, or nothing but -inf.
    """

    scores: Tensor
    proposal: Proposal
    tokens: Tensor
    known: Tensor
    delta: Tensor
    lengths: Tensor
    ratio: Tensor
    prefix: Tensor
    mass: Tensor | None
    broken: Tensor


def compute_dtype(scores: Tensor) -> torch.dtype:
    """float64 for float64 scores (enumeration), else float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def exposed(written: Tensor) -> Tensor:
    """Which tokens were written before some token to their left.

    Args:
        written: ``Long[B, K]`` step of each token's final write.

    Returns:
        ``Bool[B, K]``: true where a position further left has a later final write. Such a token has influenced the law
        of that neighbour, whose acceptance therefore tells something about it: its own ``q`` is no longer its law.
    """
    if written.shape[1] == 0:
        return torch.zeros_like(written, dtype=torch.bool)
    return torch.cummax(written, dim=1).values > written


def leading(passed: Tensor) -> Tensor:
    """``Long[B]`` number of true entries before the first false one. ``passed``: ``Bool[B, K]``."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def inside(proposal: Proposal) -> Tensor:
    """``Bool[B, K]``: slots below the proposal's own lengths."""
    slots = torch.arange(proposal.block, device=proposal.tokens.device)
    return slots < proposal.lengths[:, None]


def draft_row(logits: Tensor, draft_ids: Tensor | None, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax of drafter logits, laid out over target ids.

    Args:
        logits: ``[B, Vd]`` what the drafter sampled from at one slot.
        draft_ids: ``Long[Vd]`` target id of each column, or None where column v is target id v.
        vocab: width V of the target's scores.
        dtype: dtype of the result.

    Returns:
        ``[B, V]`` probabilities and ``Bool[B]`` rows that have NaN, +inf or nothing but -inf. Mass on ids that the
        target does not have is dropped, so a row may sum to less than 1; ids that the drafter lacks get 0.
    """
    law = torch.softmax(logits, dim=-1, dtype=dtype)
    broken = law[:, 0].isnan()
    if draft_ids is not None:
        outside = (draft_ids < 0) | (draft_ids >= vocab)
        columns = torch.where(outside, vocab, draft_ids)  # one more column takes what the target lacks
        return law.new_zeros(law.shape[0], vocab + 1).index_add_(-1, columns, law)[:, :vocab], broken
    if law.shape[-1] < vocab:
        return pad(law, (0, vocab - law.shape[-1])), broken
    return law[:, :vocab], broken


def prepare(scores: Tensor, proposal: Proposal, residual_mass: bool = False) -> Prepared:
    """Ratios, usable lengths and prefix weights of a block, slot by slot: memory ``O(B V)``.

    A row is cut before the first token whose target row or (for a Sampled token) drafter row is not usable. Both depend
    only on the tokens before it, so the cut does not bias anything. Ids outside the target's vocabulary are *not* cut
    but rejected (``p = 0``): cutting would look at the drawn token.

    Args:
        scores: ``[B, K+1, V]`` warped target logits; -inf marks impossible tokens.
        proposal: the drafted block, law Sampled or Delta.
        residual_mass: also compute ``mass``, which block verification needs.
    """
    vocab = scores.shape[-1]
    dtype = compute_dtype(scores)
    known = (proposal.tokens >= 0) & (proposal.tokens < vocab)
    tokens = proposal.tokens.clamp(0, vocab - 1)
    sampled = proposal.logits if proposal.law == Sampled() else None
    delta = torch.ones_like(known) if sampled is None else torch.zeros_like(known)
    if proposal.delta is not None:
        delta = delta | proposal.delta
    if proposal.written is not None:
        delta = delta | exposed(proposal.written)

    alive = inside(proposal)
    weight = torch.ones(tokens.shape[0], dtype=dtype, device=scores.device)
    usable = torch.ones_like(weight, dtype=torch.bool)
    ratios, prefix, masses, broken, deltas = [], [weight], [], [], []
    lengths = torch.zeros_like(proposal.lengths)
    for slot in range(proposal.block):
        target = torch.softmax(scores[:, slot], dim=-1, dtype=dtype)
        broken.append(target[:, 0].isnan())  # one unusable score makes the whole row NaN
        token = tokens[:, slot, None]
        target_of = torch.where(known[:, slot], target.gather(1, token)[:, 0], 0.0)
        one_hot = delta[:, slot]
        ratio = target_of
        usable = usable & alive[:, slot] & ~broken[-1]
        draft = None
        if sampled is not None:
            draft, unusable = draft_row(sampled[:, slot], proposal.draft_ids, vocab, dtype)
            draft_of = draft.gather(1, token)[:, 0]
            one_hot = one_hot | ((draft_of == 0) & known[:, slot] & ~unusable)  # cannot have been sampled from this law
            usable = usable & (one_hot | ~unusable)
            ratio = torch.where(one_hot | ~known[:, slot], target_of, target_of / draft_of)
        ratio = torch.where(usable, ratio, 0.0)
        if residual_mass:
            mass = weight * (1 - target_of)
            if draft is not None:
                rest = target.mul_(weight[:, None]).sub_(draft).clamp_(min=0).sum(dim=-1)
                mass = torch.where(one_hot, mass, rest)
            masses.append(mass)
        weight = (weight * ratio).clamp(max=1.0)
        lengths = lengths + usable
        ratios.append(ratio)
        prefix.append(weight)
        deltas.append(one_hot)
    broken.append(torch.softmax(scores[:, -1], dim=-1, dtype=dtype)[:, 0].isnan())
    return Prepared(
        scores=scores,
        proposal=proposal,
        tokens=tokens,
        known=known,
        delta=_columns(deltas, delta),
        lengths=lengths,
        ratio=_columns(ratios, tokens.to(dtype)),
        prefix=torch.stack(prefix, dim=1),
        mass=_columns(masses, tokens.to(dtype)) if residual_mass else None,
        broken=torch.stack(broken, dim=1),
    )


def _columns(columns: list[Tensor], empty: Tensor) -> Tensor:
    """Stack ``[B]`` columns to ``[B, K]``; ``empty``: ``[B, 0]`` stands in where there are none."""
    return torch.stack(columns, dim=1) if columns else empty
