"""Verify a block slot by slot, for logits processors that may only see what plain decoding shows them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdiff.verify import Proposal, Purpose, Verdict, verify
from specdiff.verify.noise import RoundNoise
from specdiff.verify.prepare import exposed


class _ShiftedNoise:
    """The round's noise as seen from slot ``offset``."""

    def __init__(self, noise: RoundNoise, offset: int) -> None:
        self.noise, self.offset = noise, offset

    def uniform(self, purpose: Purpose, slots: int) -> Tensor:
        return self.noise.uniform(purpose, self.offset + slots)[:, self.offset :]

    def exponential(self, purpose: Purpose, slots: int, ids: Tensor) -> Tensor:
        return self.noise.exponential(purpose, self.offset + slots, ids)[:, self.offset :]

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        return self.noise.coupled(self.offset + slots, ids)[:, self.offset :]


def verify_in_order(
    rule: str,
    logits: Tensor,
    proposal: Proposal,
    noise: RoundNoise,
    score: Callable[[Tensor, Tensor], Tensor],
    ends: Callable[[Tensor, list[Tensor]], bool],
) -> tuple[Verdict, Tensor]:
    """Verify one row: slot i is scored only after slot i - 1 was accepted and did not end the row.

    Args:
        rule: ``greedy``, ``token`` or ``coupled`` (``block`` needs all slots at once).
        logits: raw target logits ``[1, K+1, V]``.
        proposal: the drafted block of one row.
        noise: the round's noise.
        score: ``(accepted drafts Long[i], raw logits [1, V]) -> processed [1, V]``, called in order.
        ends: ``(accepted drafts Long[i], processed scores of each) -> bool``, called once for each accepted draft:
            whether the row ends there, so that nothing may be scored behind it.

    Returns:
        The verdict, and the processed scores ``[1, n, V]`` of the slots that were reached. Where the row ended, the
        next token means nothing.
    """
    length = int(proposal.lengths[0])
    drafts = proposal.tokens[0]
    seen: list[Tensor] = []
    for slot in range(length):
        scores = score(drafts[:slot], logits[:, slot])
        seen.append(scores)
        # The second row only stands where a bonus would be drawn; its outcome is thrown away.
        one = _slot(proposal, slot)
        verdict = verify(rule, torch.stack([scores, torch.zeros_like(scores)], dim=1), one, _ShiftedNoise(noise, slot))
        if bool(verdict.bad[0]) or int(verdict.accepted[0]) == 0:
            return Verdict(verdict.accepted + slot, verdict.next_token, verdict.bad), torch.stack(seen, dim=1)
        if ends(drafts[: slot + 1], seen):
            return Verdict(verdict.accepted + slot, drafts[slot : slot + 1], verdict.bad), torch.stack(seen, dim=1)
    scores = score(drafts[:length], logits[:, length])
    seen.append(scores)
    verdict = verify(rule, scores[:, None], Proposal.empty(1, drafts.device), _ShiftedNoise(noise, length))
    return Verdict(verdict.accepted + length, verdict.next_token, verdict.bad), torch.stack(seen, dim=1)


def _slot(proposal: Proposal, slot: int) -> Proposal:
    """The proposal of one slot, exposure worked out on the whole block first."""
    part = slice(slot, slot + 1)
    delta = proposal.delta
    if proposal.written is not None:
        late = exposed(proposal.written)
        delta = late if delta is None else delta | late
    return Proposal(
        tokens=proposal.tokens[:, part],
        lengths=torch.ones_like(proposal.lengths),
        law=proposal.law,
        logits=None if proposal.logits is None else proposal.logits[:, part],
        draft_ids=proposal.draft_ids,
        delta=None if delta is None else delta[:, part],
    )
