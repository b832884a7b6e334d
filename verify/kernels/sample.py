"""Sampling in one pass: every program races one tile of one row, without writing noise or probabilities."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from specdiff.verify.kernels.device import exponential, slot_state


@triton.jit
def tile_logits(logits, base, stride_v, columns, inside, inverse_temperature):
    """A tile of warped logits as float32, -inf outside."""
    x = tl.load(logits + base + columns.to(tl.int64) * stride_v, mask=inside, other=float("-inf"))
    return x.to(tl.float32) * inverse_temperature


@triton.jit
def sample_tiles(
    logits, row_states, lengths, ids, best_value, best_column, broken,
    slots, vocab, splits, stride_b, stride_s, stride_v, inverse_temperature,
    PURPOSE: tl.constexpr, BY_POSITION: tl.constexpr, NOISE: tl.constexpr, HAS_IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Winner of one tile: ``argmax(logit / T - log E)``, the lowest column of equals.

    Grid: (B * S, splits). Writes ``best_value``, ``best_column`` and ``broken`` (1: NaN or +inf seen), each
    ``[B, S, splits]``.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, s = row // slots, row % slots
    columns = split * TILE + tl.arange(0, TILE)
    inside = columns < vocab
    x = tile_logits(logits, b * stride_b + s * stride_s, stride_v, columns, inside, inverse_temperature)
    wrong = (x != x) | (x == float("inf"))
    score = tl.where(wrong, float("-inf"), x)
    if NOISE:
        keys = columns
        if HAS_IDS:
            keys = tl.load(ids + columns, mask=inside, other=0).to(tl.int32)
        state = slot_state(tl.load(row_states + b), tl.load(lengths + b), s, PURPOSE, BY_POSITION)
        score = score - tl.log(exponential(state, keys))
        score = tl.where(inside, score, float("-inf"))
    out = row * splits + split
    tl.store(best_value + out, tl.max(score, axis=0))
    tl.store(best_column + out, split * TILE + tl.argmax(score, axis=0))
    tl.store(broken + out, tl.max(wrong.to(tl.int32), axis=0))


@triton.jit
def sample_finish(
    best_value, best_column, broken, ids, tokens, bad, splits, HAS_IDS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Winner of a row over its tiles. Grid: (B * S,). Writes ``tokens`` and ``bad``, each ``[B, S]``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SPLITS)
    inside = at < splits
    value = tl.load(best_value + row * splits + at, mask=inside, other=float("-inf"))
    column = tl.load(best_column + row * splits + at, mask=inside, other=2147483647)
    wrong = tl.load(broken + row * splits + at, mask=inside, other=0)
    top = tl.max(value, axis=0)
    winner = tl.min(tl.where(inside & (value == top), column, 2147483647), axis=0)
    if HAS_IDS:
        token = tl.load(ids + winner)
    else:
        token = winner.to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(bad + row, (tl.max(wrong, axis=0) > 0) | (top == float("-inf")))
