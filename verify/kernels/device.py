"""Device functions shared by the kernels: the counter hash and its exponentials, bit for bit as in ``noise.py``."""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def absorb(state, word):
    """Mix one 32-bit key word into a state. Both uint32; arithmetic wraps."""
    x = (state ^ (word * 0x9E3779B1)) + 0x6A09E667
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def slot_state(row_state, length, slot, PURPOSE: tl.constexpr, BY_POSITION: tl.constexpr):
    """Hash state of one row and slot: keyed by logical position alone, or by round and slot."""
    # one-element blocks, since scalars do not wrap in the interpreter (and loop counters are plain ints there)
    zero = tl.zeros([1], dtype=tl.int64)
    state = absorb((zero + row_state).to(tl.uint32), (zero + PURPOSE).to(tl.uint32))
    if BY_POSITION:
        return absorb(state, (zero + length + slot).to(tl.uint32))
    return absorb(absorb(state, (zero + length).to(tl.uint32)), (zero + slot).to(tl.uint32))


@triton.jit
def exponential(state, ids):
    """Standard exponentials of a state and a block of ids, float32."""
    bits = absorb(state, ids.to(tl.uint32))
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994039535522)
    rest = 1.0 - u
    # log1p(-u) = log(rest) * (-u) / (rest - 1), exact to an ulp where rest rounds
    lost = 1.0 - rest
    return tl.where(lost == 0.0, u, -tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost)))
