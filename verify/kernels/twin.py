"""What the kernels compute, in torch: their reference in tests and benchmarks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdiff.verify.draw import race
from specdiff.verify.laws import Proposal, Verdict
from specdiff.verify.noise import CounterNoise, Purpose, exponentials
from specdiff.verify.rules import verify


def twin_verify(
    rule: str,
    logits: Tensor,
    proposal: Proposal,
    noise: CounterNoise,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
) -> Verdict:
    """Reference of :func:`specdiff.verify.kernels.fused_verify`."""
    if proposal.logits is not None and draft_temperature != 1.0:
        proposal = replace(proposal, logits=proposal.logits.float() / draft_temperature)
    scores = logits if temperature == 1.0 else logits.float() / temperature
    return verify(rule, scores, proposal, noise)


def twin_sample(
    logits: Tensor,
    noise: CounterNoise | None,
    purpose: Purpose,
    temperature: float = 1.0,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`specdiff.verify.kernels.fused_sample`."""
    law = torch.softmax(logits.float() / temperature, dim=-1)
    keys = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    if noise is None:
        columns = torch.argmax(logits, dim=-1)
    else:
        columns = race(law, exponentials(noise.states(purpose, logits.shape[1]), keys))
    return keys[columns], law[..., 0].isnan()


def inverse_ids(draft_ids: Tensor, vocab: int) -> Tensor:
    """``Int[vocab]`` column of each target id in a pruned draft vocabulary, -1 where it has none.

    Args:
        draft_ids: ``Long[Vd]`` target id of each column, all different; those outside the vocabulary are left out.
        vocab: width of the target's logits.
    """
    outside = (draft_ids < 0) | (draft_ids >= vocab)
    inverse = torch.full((vocab + 1,), -1, dtype=torch.int32, device=draft_ids.device)
    columns = torch.arange(draft_ids.shape[0], dtype=torch.int32, device=draft_ids.device)
    return inverse.scatter_(0, torch.where(outside, vocab, draft_ids), columns)[:vocab]
