"""Launching the kernels: buffers, grids, and the choice of arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specdiff.errors import InvalidInputError
from specdiff.verify.kernels.fused import accept, decide_prefix, draw_finish, draw_tiles, mass_tiles, row_statistics
from specdiff.verify.kernels.sample import sample_finish, sample_tiles
from specdiff.verify.kernels.twin import inverse_ids
from specdiff.verify.laws import Proposal, Sampled, Verdict
from specdiff.verify.noise import CounterNoise, Purpose
from specdiff.verify.prepare import exposed, inside, leading
from specdiff.verify.rules import check

TILE = 4096
"""Vocabulary entries per program. A power of 2; tests use small ones."""


@dataclass(eq=False)
class Trace:
    """What a launch of the ratio kernels decided on the way, for tests. Shapes as in ``prepare.Prepared``."""

    verdict: Verdict
    thresholds: Tensor
    lengths: Tensor
    prefix: Tensor


def launch_sample(
    logits: Tensor,
    noise: CounterNoise | None,
    purpose: Purpose,
    temperature: float = 1.0,
    ids: Tensor | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """See :func:`specdiff.verify.kernels.fused_sample`."""
    _check_temperature(temperature)
    batch, slots, vocab = logits.shape
    splits = triton.cdiv(vocab, tile)
    device = logits.device
    value = torch.empty(batch, slots, splits, dtype=torch.float32, device=device)
    column = torch.empty(batch, slots, splits, dtype=torch.int32, device=device)
    broken = torch.empty(batch, slots, splits, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, slots, dtype=torch.long, device=device)
    bad = torch.empty(batch, slots, dtype=torch.bool, device=device)
    if batch * slots == 0:
        return tokens, bad
    row_states, lengths = (tokens, tokens) if noise is None else (noise.row_states, noise.lengths)
    sample_tiles[(batch * slots, splits)](
        logits, row_states, lengths, tokens if ids is None else ids, value, column, broken,
        slots, vocab, splits, *logits.stride(), 1.0 / temperature,
        PURPOSE=int(purpose), BY_POSITION=purpose == Purpose.COUPLED, NOISE=noise is not None,
        HAS_IDS=ids is not None, TILE=tile,
    )  # fmt: skip
    sample_finish[(batch * slots,)](
        value, column, broken, tokens if ids is None else ids, tokens, bad, splits,
        HAS_IDS=ids is not None, SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return tokens, bad


def launch_verify(
    rule: str,
    logits: Tensor,
    proposal: Proposal,
    noise: CounterNoise,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
    inverse: Tensor | None = None,
    tile: int = TILE,
) -> Verdict:
    """See :func:`specdiff.verify.kernels.fused_verify`."""
    check(rule, logits, proposal)
    if rule in ("token", "block"):
        return trace_verify(rule, logits, proposal, noise, temperature, draft_temperature, inverse, tile).verdict
    coupled = noise if rule == "coupled" else None
    tokens, broken = launch_sample(logits, coupled, Purpose.COUPLED, temperature, tile=tile)
    same = (proposal.tokens == tokens[:, :-1]) & inside(proposal) & ~broken[:, :-1]
    kept = leading(same)[:, None]
    return Verdict(kept[:, 0], tokens.gather(1, kept)[:, 0], broken.gather(1, kept)[:, 0])


def trace_verify(
    rule: str,
    logits: Tensor,
    proposal: Proposal,
    noise: CounterNoise,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
    inverse: Tensor | None = None,
    tile: int = TILE,
) -> Trace:
    """The ratio rules, with what they decided on the way."""
    _check_temperature(temperature)
    _check_temperature(draft_temperature)
    batch, _, vocab = logits.shape
    slots = proposal.block
    device = logits.device
    draft = proposal.logits if proposal.law == Sampled() and slots else None
    pruned = draft is not None and proposal.draft_ids is not None
    if pruned and inverse is None:
        assert proposal.draft_ids is not None
        inverse = inverse_ids(proposal.draft_ids, vocab)
    width = 0 if draft is None else draft.shape[-1]
    splits, draft_splits = triton.cdiv(vocab, tile), max(1, triton.cdiv(width, tile))
    forced = _forced(proposal) if draft is not None else None

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    target_max, target_sum = floats(batch, slots + 1, splits), floats(batch, slots + 1, splits)
    draft_max, draft_sum = floats(batch, slots, draft_splits), floats(batch, slots, draft_splits)
    target_lse, draft_lse, prefix = floats(batch, slots + 1), floats(batch, slots), floats(batch, slots + 1)
    target_of, ratio, thresholds = floats(batch, slots), floats(batch, slots), floats(batch, slots)
    one_hot, broken = ints(batch, slots), ints(batch, slots + 1)
    usable, bad, scale = ints(batch), ints(batch), floats(batch)
    accepted = torch.empty(batch, dtype=torch.long, device=device)
    next_token = torch.empty(batch, dtype=torch.long, device=device)
    if batch == 0:
        return Trace(Verdict(accepted, next_token, bad.bool()), thresholds, usable, prefix)

    none = broken  # stands in for pointers that a constexpr flag switches off
    source = logits if draft is None else draft
    target_strides, draft_strides = logits.stride(), source.stride()
    warm, draft_warm = 1.0 / temperature, 1.0 / draft_temperature
    map_ids = inverse if inverse is not None and pruned else none
    powers = {"splits": triton.next_power_of_2(splits), "draft": triton.next_power_of_2(draft_splits)}
    flags = {"SAMPLED": draft is not None, "PRUNED": pruned}

    row_statistics[(batch * (slots + 1), splits)](
        logits, target_max, target_sum, slots + 1, vocab, splits, *target_strides, warm, TILE=tile
    )
    if draft is not None:
        row_statistics[(batch * slots, draft_splits)](
            draft, draft_max, draft_sum, slots, width, draft_splits, *draft_strides, draft_warm, TILE=tile
        )
    decide_prefix[(batch,)](
        logits, source, proposal.tokens.contiguous(), proposal.lengths.contiguous(),
        none if forced is None else forced, map_ids, target_max, target_sum, draft_max, draft_sum,
        target_lse, draft_lse, one_hot, target_of, ratio, prefix, usable, broken,
        slots, vocab, width, splits, draft_splits, *target_strides, *draft_strides, warm, draft_warm,
        FORCED=forced is not None, TARGET_SPLITS=powers["splits"], DRAFT_SPLITS=powers["draft"], **flags,
    )  # fmt: skip
    mass = floats(batch, slots, splits) if rule == "block" and draft is not None else prefix
    if rule == "block" and draft is not None:
        mass_tiles[(batch * slots, splits)](
            logits, draft, map_ids, target_lse, draft_lse, prefix, mass,
            slots, vocab, width, splits, *target_strides, *draft_strides, warm, draft_warm, PRUNED=pruned, TILE=tile,
        )  # fmt: skip
    accept[(batch,)](
        noise.row_states, noise.lengths, mass, one_hot, target_of, ratio, prefix, usable, broken,
        thresholds, accepted, scale, bad, slots, splits,
        PURPOSE=int(Purpose.ACCEPT), BLOCK=rule == "block", SAMPLED=draft is not None, SPLITS=powers["splits"],
    )  # fmt: skip
    rest_value, rest_id = floats(batch, splits), ints(batch, splits)
    full_value, full_id = floats(batch, splits), ints(batch, splits)
    draw_tiles[(batch, splits)](
        logits, source, map_ids, proposal.tokens.contiguous(), noise.row_states, noise.lengths, target_lse, draft_lse,
        one_hot, usable, accepted, scale, rest_value, rest_id, full_value, full_id,
        slots, vocab, width, splits, *target_strides, *draft_strides, warm, draft_warm,
        PURPOSE=int(Purpose.RESIDUAL), TILE=tile, **flags,
    )  # fmt: skip
    draw_finish[(batch,)](rest_value, rest_id, full_value, full_id, next_token, splits, vocab, SPLITS=powers["splits"])
    return Trace(Verdict(accepted, next_token, bad.bool()), thresholds, usable.long(), prefix)


def _forced(proposal: Proposal) -> Tensor | None:
    """``Int[B, K]`` tokens of a Sampled proposal that must be tested as Delta, None if there is none to look at."""
    flags = proposal.delta
    if proposal.written is not None:
        flags = exposed(proposal.written) if flags is None else flags | exposed(proposal.written)
    return None if flags is None else flags.to(torch.int32).contiguous()


def _check_temperature(value: float) -> None:
    if not value > 0:
        raise InvalidInputError(f"temperature must be positive, got {value}; use the greedy rule for temperature 0")
