"""The four acceptance rules behind one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify import block as block_rule
from specdiff.verify import coupled as coupled_rule
from specdiff.verify import greedy as greedy_rule
from specdiff.verify import kernels
from specdiff.verify import token as token_rule
from specdiff.verify.draw import race
from specdiff.verify.laws import Coupled, Proposal, Verdict
from specdiff.verify.noise import Purpose, RoundNoise
from specdiff.verify.prepare import inside, leading, prepare

RULES = ("greedy", "token", "block", "coupled")
"""Names of the acceptance rules."""


@dataclass(eq=False)
class Decision:
    """A rule applied to a block, before any of its random numbers: pure functions of scores and proposal.

    Attributes:
        thresholds: ``[B, K]`` test i passes if its uniform is below it, strictly; 0 past a row's length.
        lengths: ``Long[B]`` most tokens that a row can keep (proposals are cut before unusable rows).
        accepted: ``Bool[B, K] -> Long[B]``: tokens kept, given which tests passed.
        weights: ``Long[B] -> [B, V]``: unnormalised law of the token that follows so many kept ones.
        broken: ``Bool[B, K+1]`` unusable target rows.
    """

    thresholds: Tensor
    lengths: Tensor
    accepted: Callable[[Tensor], Tensor]
    weights: Callable[[Tensor], Tensor]
    broken: Tensor

    def bad(self, accepted: Tensor) -> Tensor:
        """``Bool[B]``: the row needed a broken target row. Earlier rows than ``accepted`` cannot be broken."""
        return self.broken.gather(1, accepted[:, None])[:, 0]


def decide(rule: str, scores: Tensor, proposal: Proposal, noise: RoundNoise | None = None) -> Decision:
    """The ingredients of a rule's decision, without its draws.

    Args:
        rule: one of :data:`RULES`.
        scores: ``[B, K+1, V]`` warped target logits; row i is the law of the token at slot i, -inf is impossible.
        proposal: the drafted block.
        noise: only for ``"coupled"``, whose decision is a function of the noise.

    Raises:
        InvalidInputError: shapes, dtypes or the rule's name are wrong.
        UnsupportedError: token or block with a ``Coupled`` proposal.
    """
    check(rule, scores, proposal)
    if rule in ("greedy", "coupled"):
        return _decide_equal(rule, scores, proposal, noise)
    return _decide_ratio(rule, scores, proposal)


def verify(rule: str, scores: Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict:
    """Decide how many drafted tokens are kept and draw the token after them.

    The law of what comes out is exactly that of the scores (``greedy``: the argmax), see the rules' modules. Never
    waits for the device. On CUDA tensors it runs as fused kernels where triton is installed
    (:mod:`specdiff.verify.kernels`). Memory: a few ``[B, V]`` arrays, never ``[B, K, V]`` (coupled: its noise).

    Args:
        rule: ``"greedy"``, ``"token"``, ``"block"`` or ``"coupled"``.
        scores: ``[B, K+1, V]`` warped target logits in any float dtype; row i is the law of the token at slot i given
            the drafted tokens before it; -inf marks impossible tokens. Rows past a row's length are ignored.
        proposal: the drafted block; greedy and coupled take any law, token and block take Sampled and Delta.
        noise: the round's noise. token and block use ``uniform(ACCEPT)`` and, for the one token that is drawn in a
            round, slot 0 of ``exponential(RESIDUAL)``; coupled uses ``coupled``; greedy uses none.

    Returns:
        The verdict. Tokens of ``bad`` rows have no meaning.

    Raises:
        InvalidInputError: shapes, dtypes or the rule's name are wrong.
        UnsupportedError: token or block with a ``Coupled`` proposal.
    """
    check(rule, scores, proposal)
    if kernels.serve(scores, noise):
        fused = kernels.attempt(rule, scores, proposal, noise)
        if fused is not None:
            return fused
    if rule in ("greedy", "coupled"):
        tokens, broken = _choices(rule, scores, noise)
        same = (proposal.tokens == tokens[:, :-1]) & inside(proposal) & ~broken[:, :-1]
        kept = leading(same)[:, None]
        return Verdict(kept[:, 0], tokens.gather(1, kept)[:, 0], broken.gather(1, kept)[:, 0])

    slots, vocab = scores.shape[1:]
    decision = _decide_ratio(rule, scores, proposal)
    kept = decision.accepted(noise.uniform(Purpose.ACCEPT, slots - 1) < decision.thresholds)
    exponential = noise.exponential(Purpose.RESIDUAL, 1, torch.arange(vocab, device=scores.device))[:, 0]
    return Verdict(kept, race(decision.weights(kept), exponential), decision.bad(kept))


def check(rule: str, scores: Tensor, proposal: Proposal) -> None:
    """Raise if a rule cannot be applied to these scores and this proposal. Looks at shapes and dtypes only."""
    if rule not in RULES:
        raise InvalidInputError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    batch, width = proposal.tokens.shape
    if scores.dim() != 3 or scores.shape[:2] != (batch, width + 1) or scores.shape[2] == 0:
        raise InvalidInputError(
            f"scores must be [B, K+1, V] = [{batch}, {width + 1}, V] for this proposal, got {tuple(scores.shape)}"
        )
    if not scores.is_floating_point():
        raise InvalidInputError(f"scores must be floating point logits, got {scores.dtype}")
    if rule in ("token", "block") and proposal.law == Coupled():
        raise UnsupportedError(
            f"rule {rule!r} cannot test a Coupled proposal: its tokens share their noise with the target, so a ratio "
            "test would be biased. Use rule='coupled' (or 'greedy'), or draw the proposal with Purpose.DRAFT (Sampled)."
        )


def _choices(rule: str, scores: Tensor, noise: RoundNoise | None) -> tuple[Tensor, Tensor]:
    if rule == "greedy":
        return greedy_rule.choices(scores)
    if noise is None:
        raise InvalidInputError("rule 'coupled' decides by its noise: pass the round's noise")
    return coupled_rule.choices(scores, noise)


def _decide_equal(rule: str, scores: Tensor, proposal: Proposal, noise: RoundNoise | None) -> Decision:
    """Rules that keep a token while it equals the target's own: thresholds are 0 or 1, the next token is certain."""
    tokens, broken = _choices(rule, scores, noise)
    usable = inside(proposal) & ~broken[:, :-1]
    same = (proposal.tokens == tokens[:, :-1]) & usable

    def weights(kept: Tensor) -> Tensor:
        chosen = tokens.gather(1, kept[:, None])
        return torch.zeros_like(scores[:, 0], dtype=torch.float32).scatter_(1, chosen, 1.0)

    return Decision(same.float(), leading(usable), leading, weights, broken)


def _decide_ratio(rule: str, scores: Tensor, proposal: Proposal) -> Decision:
    block = prepare(scores, proposal, residual_mass=rule == "block")
    if rule == "token":
        return Decision(
            token_rule.thresholds(block),
            block.lengths,
            token_rule.accepted,
            lambda kept: token_rule.weights(block, kept),
            block.broken,
        )
    return Decision(
        block_rule.thresholds(block),
        block.lengths,
        block_rule.accepted,
        lambda kept: block_rule.weights(block, kept),
        block.broken,
    )
