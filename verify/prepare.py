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
        target: ``[B, K+1, V]`` target probabilities ``p``; a row is all NaN where the scores were not usable.
        draft: ``[B, K, V]`` drafter probabilities ``q`` over target ids, or None if every token is tested as Delta.
        tokens: ``Long[B, K]`` drafted ids, clamped into the vocabulary.
        known: ``Bool[B, K]`` the drafted id lies inside the target's vocabulary (else ``p(x) = 0``).
        delta: ``Bool[B, K]`` the token is tested with a one-hot ``q``.
        lengths: ``Long[B]`` number of tokens that can be tested, see :func:`prepare`.
        target_of: ``[B, K]`` ``p_i(x_i)``, 0 past ``lengths``.
        ratio: ``[B, K]`` ``p_i(x_i) / q_i(x_i)``, 0 past ``lengths``.
        broken: ``Bool[B, K+1]`` target rows with NaN, +inf, or nothing but -inf.
    """

    target: Tensor
    draft: Tensor | None
    tokens: Tensor
    known: Tensor
    delta: Tensor
    lengths: Tensor
    target_of: Tensor
    ratio: Tensor
    broken: Tensor

    @property
    def valid(self) -> Tensor:
        """``Bool[B, K]``: the slot holds a token that can be tested."""
        slots = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return slots < self.lengths[:, None]


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


def draft_probabilities(
    logits: Tensor, draft_ids: Tensor | None, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Softmax of the drafter's logits, laid out over target ids.

    Args:
        logits: ``[B, K, Vd]`` what the drafter sampled from.
        draft_ids: ``Long[Vd]`` target id of each column, or None where column v is target id v.
        vocab: width of the target's scores.
        dtype: dtype of the result.

    Returns:
        ``[B, K, vocab]`` probabilities and ``Bool[B, K]`` rows that have NaN, +inf or nothing but -inf. Mass on ids
        that the target does not have is dropped, so a row may sum to less than 1; ids that the drafter lacks get 0.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=dtype)
    broken = probabilities[..., 0].isnan()
    width = probabilities.shape[-1]
    if draft_ids is not None:
        outside = (draft_ids < 0) | (draft_ids >= vocab)
        columns = torch.where(outside, vocab, draft_ids)  # one more column takes what the target lacks
        full = probabilities.new_zeros(*probabilities.shape[:2], vocab + 1)
        return full.index_add_(-1, columns, probabilities)[..., :vocab], broken
    if width < vocab:
        return pad(probabilities, (0, vocab - width)), broken
    return probabilities[..., :vocab], broken


def prepare(scores: Tensor, proposal: Proposal) -> Prepared:
    """Probabilities, ratios and usable lengths of a block.

    A row is cut before the first token whose target row or (for a Sampled token) drafter row is not usable. Both depend
    only on the tokens before it, so the cut does not bias anything. Ids outside the target's vocabulary are *not* cut
    but rejected (``p = 0``): cutting would look at the drawn token.

    Args:
        scores: ``[B, K+1, V]`` warped target logits; -inf marks impossible tokens.
        proposal: the drafted block, law Sampled or Delta.
    """
    vocab = scores.shape[-1]
    dtype = compute_dtype(scores)
    target = torch.softmax(scores, dim=-1, dtype=dtype)
    broken = target[..., 0].isnan()  # one unusable score makes the whole row NaN
    known = (proposal.tokens >= 0) & (proposal.tokens < vocab)
    tokens = proposal.tokens.clamp(0, vocab - 1)
    target_of = torch.where(known, target[:, :-1].gather(-1, tokens[..., None])[..., 0], 0.0)
    usable = inside(proposal) & ~broken[:, :-1]

    draft = None
    delta = torch.ones_like(known)
    ratio = target_of
    if proposal.law == Sampled() and proposal.logits is not None and proposal.block:
        draft, unusable = draft_probabilities(proposal.logits, proposal.draft_ids, vocab, dtype)
        draft_of = draft.gather(-1, tokens[..., None])[..., 0]
        # a token that its own law calls impossible was not sampled from it
        delta = (draft_of == 0) & known
        if proposal.delta is not None:
            delta = delta | proposal.delta
        if proposal.written is not None:
            delta = delta | exposed(proposal.written)
        usable = usable & (delta | ~unusable)
        ratio = torch.where(delta | ~known, target_of, target_of / draft_of)

    lengths = leading(usable)
    valid = torch.arange(proposal.block, device=tokens.device) < lengths[:, None]
    target_of = torch.where(valid, target_of, 0.0)
    ratio = torch.where(valid, ratio, 0.0)
    return Prepared(target, draft, tokens, known, delta, lengths, target_of, ratio, broken)
