"""The ratio rules (token, block) as five small kernels.

1. ``row_statistics``: maximum and sum of exponentials of every tile of every target and drafter row.
2. ``decide_prefix``: log-sum-exps, ratios, usable lengths and prefix weights; one program per batch row.
3. ``mass_tiles`` (block): ``sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+`` of every tile.
4. ``accept``: thresholds against uniforms.
5. ``draw_tiles`` and ``draw_finish``: the race over what is left of the one row that needs it.

Target and drafter logits are read once (token) or twice (block), plus one row each; nothing of size V is written.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from specdiff.verify.kernels.device import exponential, slot_state
from specdiff.verify.kernels.sample import tile_logits


@triton.jit
def row_statistics(
    logits, part_max, part_sum, slots, vocab, splits, stride_b, stride_s, stride_v, inverse_temperature,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B * S, splits). Writes maximum and ``sum(exp(x - max))`` of a tile; the sum is NaN for NaN and +inf."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    columns = split * TILE + tl.arange(0, TILE)
    base = row // slots * stride_b + row % slots * stride_s
    x = tile_logits(logits, base, stride_v, columns, columns < vocab, inverse_temperature)
    wrong = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
    x = tl.where((x != x) | (x == float("inf")), float("-inf"), x)
    top = tl.max(x, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - anchor), axis=0)
    tl.store(part_max + row * splits + split, top)
    tl.store(part_sum + row * splits + split, tl.where(wrong, float("nan"), total))


@triton.jit
def log_sum_exp(part_max, part_sum, row, splits, SPLITS: tl.constexpr):
    """Log-sum-exp of one row from its tiles: NaN for NaN and +inf, -inf where nothing is possible."""
    at = tl.arange(0, SPLITS)
    inside = at < splits
    tops = tl.load(part_max + row * splits + at, mask=inside, other=float("-inf"))
    sums = tl.load(part_sum + row * splits + at, mask=inside, other=0.0)
    wrong = tl.max((sums != sums).to(tl.int32), axis=0) > 0
    top = tl.max(tops, axis=0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(sums != sums, 0.0, sums * tl.exp(tops - anchor)), axis=0)
    nothing = total <= 0.0
    value = tl.where(nothing, float("-inf"), anchor + tl.log(tl.where(nothing, 1.0, total)))
    return tl.where(wrong, float("nan"), value)


@triton.jit
def decide_prefix(
    target, draft, tokens, lengths, forced, inverse,
    target_max, target_sum, draft_max, draft_sum,
    target_lse, draft_lse, one_hot, target_of, ratio, prefix, usable_length, broken,
    slots, vocab, width, target_splits, draft_splits,
    target_b, target_s, target_v, draft_b, draft_s, draft_v,
    inverse_temperature, draft_inverse_temperature,
    SAMPLED: tl.constexpr, FORCED: tl.constexpr, PRUNED: tl.constexpr,
    TARGET_SPLITS: tl.constexpr, DRAFT_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). Everything of :class:`specdiff.verify.prepare.Prepared` that is not of size V, for one row."""
    b = tl.program_id(0).to(tl.int64)
    limit = tl.load(lengths + b)
    weight = 1.0
    usable = 1
    count = 0
    tl.store(prefix + b * (slots + 1), weight)
    for slot in range(slots + 1):
        lse = log_sum_exp(target_max, target_sum, b * (slots + 1) + slot, target_splits, TARGET_SPLITS)
        fails = (lse != lse) | (lse == float("-inf"))
        tl.store(target_lse + b * (slots + 1) + slot, lse)
        tl.store(broken + b * (slots + 1) + slot, fails.to(tl.int32))
        if slot < slots:
            at = b * slots + slot
            token = tl.load(tokens + at)
            known = (token >= 0) & (token < vocab)
            x = tl.load(target + b * target_b + slot * target_s + token * target_v, mask=known, other=float("-inf"))
            chance = tl.where(known, tl.exp(x.to(tl.float32) * inverse_temperature - lse), 0.0)
            usable = usable * ((slot < limit) & (fails == 0)).to(tl.int32)
            single = 1
            test = chance
            if SAMPLED:
                single = 0
                if FORCED:
                    single = tl.load(forced + at).to(tl.int32)
                draft_row = log_sum_exp(draft_max, draft_sum, at, draft_splits, DRAFT_SPLITS)
                lost = (draft_row != draft_row) | (draft_row == float("-inf"))
                column = token
                if PRUNED:
                    column = tl.load(inverse + token, mask=known, other=-1).to(tl.int64)
                held = known & (column >= 0) & (column < width)
                y = tl.load(draft + b * draft_b + slot * draft_s + column * draft_v, mask=held, other=float("-inf"))
                drawn = tl.where(held, tl.exp(y.to(tl.float32) * draft_inverse_temperature - draft_row), 0.0)
                single = tl.where((drawn == 0.0) & known & (lost == 0), 1, single)
                usable = usable * ((single == 1) | (lost == 0)).to(tl.int32)
                tl.store(draft_lse + at, draft_row)
                divide = (single == 0) & known & (drawn > 0.0)
                test = tl.where(divide, chance / tl.where(divide, drawn, 1.0), chance)
            test = tl.where(usable == 1, test, 0.0)
            weight = tl.minimum(weight * test, 1.0)
            count += usable
            tl.store(one_hot + at, single)
            tl.store(target_of + at, tl.where(usable == 1, chance, 0.0))
            tl.store(ratio + at, test)
            tl.store(prefix + b * (slots + 1) + slot + 1, weight)
    tl.store(usable_length + b, count)


@triton.jit
def probabilities(
    target, draft, inverse, b, slot, draft_slot, columns, inside, width, lse, draft_row,
    target_b, target_s, target_v, draft_b, draft_s, draft_v, inverse_temperature, draft_inverse_temperature,
    SAMPLED: tl.constexpr, PRUNED: tl.constexpr,
):  # fmt: skip
    """Tiles of ``p`` and ``q`` over target ids."""
    x = tile_logits(target, b * target_b + slot * target_s, target_v, columns, inside, inverse_temperature)
    p = tl.exp(x - lse)
    q = p * 0.0
    if SAMPLED:
        drawn = columns
        if PRUNED:
            drawn = tl.load(inverse + columns, mask=inside, other=-1)
        held = inside & (drawn >= 0) & (drawn < width)
        y = tile_logits(draft, b * draft_b + draft_slot * draft_s, draft_v, drawn, held, draft_inverse_temperature)
        q = tl.where(held, tl.exp(y - draft_row), 0.0)
    return p, q


@triton.jit
def mass_tiles(
    target, draft, inverse, target_lse, draft_lse, prefix, part_mass,
    slots, vocab, width, splits, target_b, target_s, target_v, draft_b, draft_s, draft_v,
    inverse_temperature, draft_inverse_temperature, PRUNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B * K, splits). Mass of ``(P_i p_{i+1} - q_{i+1})+`` in one tile."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, slot = row // slots, row % slots
    columns = split * TILE + tl.arange(0, TILE)
    inside = columns < vocab
    p, q = probabilities(
        target, draft, inverse, b, slot, slot, columns, inside, width,
        tl.load(target_lse + b * (slots + 1) + slot), tl.load(draft_lse + row),
        target_b, target_s, target_v, draft_b, draft_s, draft_v, inverse_temperature, draft_inverse_temperature,
        True, PRUNED,
    )  # fmt: skip
    rest = tl.maximum(tl.load(prefix + b * (slots + 1) + slot) * p - q, 0.0)
    tl.store(part_mass + row * splits + split, tl.sum(tl.where(inside, rest, 0.0), axis=0))


@triton.jit
def accept(
    row_states, round_lengths, part_mass, one_hot, target_of, ratio, prefix, usable_length, broken,
    thresholds, accepted, scale, bad, slots, splits,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (B,). Thresholds, accepted counts, the factor of p in the residual, and rows that are bad."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(usable_length + b)
    row_state, round_length = tl.load(row_states + b), tl.load(round_lengths + b)
    kept = 0
    going = 1
    for slot in range(slots):
        at = b * slots + slot
        if BLOCK:
            through = tl.load(prefix + b * (slots + 1) + slot + 1)
            h = through
            if slot + 1 < slots:
                mass = through * (1.0 - tl.load(target_of + at + 1))
                if SAMPLED:
                    tiles = tl.arange(0, SPLITS)
                    parts = tl.load(part_mass + (at + 1) * splits + tiles, mask=tiles < splits, other=0.0)
                    mass = tl.where(tl.load(one_hot + at + 1) == 1, mass, tl.sum(parts, axis=0))
                below = mass + (1.0 - through)
                inner = tl.where(below > 0.0, mass / tl.where(below > 0.0, below, 1.0), 1.0)
                h = tl.where(slot + 1 < length, inner, through)
            h = tl.where(slot < length, h, 0.0)
        else:
            h = tl.minimum(tl.load(ratio + at), 1.0)
        tl.store(thresholds + at, h)
        bits = slot_state(row_state, round_length, slot, PURPOSE, False)
        u = tl.sum(bits.to(tl.float64), axis=0) * 2.3283064365386963e-10
        passed = (u < h.to(tl.float64)).to(tl.int32)
        if BLOCK:
            kept = tl.where(passed == 1, slot + 1, kept)
        else:
            going = going * passed
            kept += going
    tl.store(accepted + b, kept)
    factor = 1.0
    if BLOCK:
        factor = tl.load(prefix + b * (slots + 1) + kept)
    tl.store(scale + b, factor)
    tl.store(bad + b, tl.load(broken + b * (slots + 1) + kept))


@triton.jit
def draw_tiles(
    target, draft, inverse, tokens, row_states, round_lengths, target_lse, draft_lse, one_hot, usable_length,
    accepted, scale, rest_value, rest_id, full_value, full_id,
    slots, vocab, width, splits, target_b, target_s, target_v, draft_b, draft_s, draft_v,
    inverse_temperature, draft_inverse_temperature,
    PURPOSE: tl.constexpr, SAMPLED: tl.constexpr, PRUNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (B, splits). Winners of one tile: of the residual, and of p itself should nothing be left."""
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    kept = tl.load(accepted + b)
    rejected = kept < tl.load(usable_length + b)
    columns = split * TILE + tl.arange(0, TILE)
    inside = columns < vocab
    at = b * slots + kept
    draft_row = 0.0
    if SAMPLED:
        draft_row = tl.load(draft_lse + at, mask=rejected, other=float("inf"))
    # after a whole proposal there is no drafter row: its log-sum-exp of inf makes q zero
    p, q = probabilities(
        target, draft, inverse, b, kept, tl.where(rejected, kept, 0), columns, inside, width,
        tl.load(target_lse + b * (slots + 1) + kept), draft_row,
        target_b, target_s, target_v, draft_b, draft_s, draft_v, inverse_temperature, draft_inverse_temperature,
        SAMPLED, PRUNED,
    )  # fmt: skip
    token = tl.load(tokens + at, mask=rejected, other=-1)
    single = tl.load(one_hot + at, mask=rejected, other=1)
    rest = tl.where(single == 1, tl.where(columns == token, 0.0, p), tl.maximum(tl.load(scale + b) * p - q, 0.0))
    state = slot_state(tl.load(row_states + b), tl.load(round_lengths + b), 0 * kept, PURPOSE, False)
    noise = exponential(state, columns)
    usable = inside & (p == p)
    rest = tl.where(usable, rest / noise, -1.0)
    full = tl.where(usable, p / noise, -1.0)
    out = b * splits + split
    tl.store(rest_value + out, tl.max(rest, axis=0))
    tl.store(rest_id + out, split * TILE + tl.argmax(rest, axis=0))
    tl.store(full_value + out, tl.max(full, axis=0))
    tl.store(full_id + out, split * TILE + tl.argmax(full, axis=0))


@triton.jit
def draw_finish(rest_value, rest_id, full_value, full_id, next_token, splits, vocab, SPLITS: tl.constexpr):
    """Grid: (B,). Winner over the tiles; that of p where the residual is empty."""
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SPLITS)
    inside = at < splits
    rest = tl.load(rest_value + b * splits + at, mask=inside, other=-1.0)
    full = tl.load(full_value + b * splits + at, mask=inside, other=-1.0)
    left = tl.max(rest, axis=0) > 0.0
    value = tl.where(left, rest, full)
    ids = tl.where(left, tl.load(rest_id + b * splits + at, mask=inside, other=0),
                   tl.load(full_id + b * splits + at, mask=inside, other=0))  # fmt: skip
    winner = tl.min(tl.where(inside & (value == tl.max(value, axis=0)), ids, 2147483647), axis=0)
    tl.store(next_token + b, tl.minimum(winner, vocab - 1).to(tl.int64))
