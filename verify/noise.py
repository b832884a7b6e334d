"""Counter-based noise: a pure function of (row seed, purpose, round, slot, vocabulary id).

No generator state exists, so rows are independent of their neighbours, a run can be repeated from its seeds alone, and
tests can enumerate by passing an object of their own with the same three methods.

The hash is 32-bit arithmetic only (a murmur-style finaliser per key word), so that torch on any device and Triton
compute the very same bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a random number is used for; part of its key."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    COUPLED = 5


class RoundNoise(Protocol):
    """The noise of one round. ``Noise.round`` makes it; tests pass their own."""

    def uniform(self, purpose: Purpose, slots: int) -> Tensor:
        """``float64[B, slots]`` uniform in [0, 1)."""
        ...

    def exponential(self, purpose: Purpose, slots: int, ids: Tensor) -> Tensor:
        """``float32[B, slots, len(ids)]`` standard exponentials, keyed by target id ``ids``: ``Long[V]``."""
        ...

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        """As ``exponential``, keyed by logical position (committed length + slot) alone, not by round."""
        ...


def _fmix(x: Tensor) -> Tensor:
    """The 32-bit murmur3 finaliser on int64 tensors that hold values in [0, 2**32)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Mix one 32-bit key word into the state."""
    return _fmix((state ^ (word * 0x9E3779B1 & _MASK)) + 0x6A09E667 & _MASK)


def mix_seed(seed: int, row: int) -> int:
    """Seed of row ``row`` under one call seed: ``mix(s, 0) = s``, other rows are scrambled 63-bit values."""
    if row == 0:
        return seed
    x = (seed + 0x9E3779B97F4A7C15 * row) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & 0x7FFFFFFFFFFFFFFF


def row_seeds(seed: int, rows: int, device: torch.device | str = "cpu") -> Tensor:
    """``Long[rows]`` seeds of a batch whose call seed is ``seed``."""
    return torch.tensor([mix_seed(seed, r) for r in range(rows)], dtype=torch.long, device=device)


class Noise:
    """All randomness of one request.

    Args:
        seeds: ``Long[B]`` one 64-bit seed per row.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds
        low = seeds & _MASK
        high = (seeds >> 32) & _MASK
        self._state = _absorb(_absorb(torch.zeros_like(seeds), low), high)

    def select(self, rows: Tensor) -> Noise:
        """The noise of a subset of rows."""
        return Noise(self.seeds[rows])

    def round(self, lengths: Tensor) -> CounterNoise:
        """The noise of the round that starts at ``lengths``: ``Long[B]`` committed logical tokens (anchor included)."""
        return CounterNoise(self._state, lengths)


class CounterNoise:
    """:class:`RoundNoise` made of the counter hash.

    Attributes:
        row_states: ``Long[B]`` hash states of the rows' seeds, in [0, 2**32).
        lengths: ``Long[B]`` committed logical tokens at the start of the round.
    """

    def __init__(self, row_states: Tensor, lengths: Tensor) -> None:
        self.row_states = row_states
        self.lengths = lengths

    def states(self, purpose: Purpose, slots: int) -> Tensor:
        """``Long[B, slots]`` hash states in [0, 2**32) that vocabulary ids are mixed into.

        ``COUPLED`` is keyed by logical position alone, every other purpose by round and slot.
        """
        slot = torch.arange(slots, device=self.row_states.device)
        state = _absorb(self.row_states, int(purpose))[:, None]
        if purpose == Purpose.COUPLED:
            return _absorb(state, self.lengths[:, None] + slot)
        return _absorb(_absorb(state, self.lengths[:, None]), slot)

    def uniform(self, purpose: Purpose, slots: int) -> Tensor:
        """``float64[B, slots]`` in [0, 1), multiples of 2**-32."""
        return self.states(purpose, slots).double() * 2.0**-32

    def exponential(self, purpose: Purpose, slots: int, ids: Tensor) -> Tensor:
        """``float32[B, slots, len(ids)]`` standard exponentials."""
        return exponentials(self.states(purpose, slots), ids)

    def coupled(self, slots: int, ids: Tensor) -> Tensor:
        """``float32[B, slots, len(ids)]`` standard exponentials keyed by logical position."""
        return exponentials(self.states(Purpose.COUPLED, slots), ids)


def exponentials(states: Tensor, ids: Tensor) -> Tensor:
    """Standard exponentials of hash states and ids.

    ``-log(1 - u)`` with ``u = (bits + 1/2) / 2**32``: exact near 0, where the winners of an exponential race are.

    Args:
        states: ``Long[B, S]`` from :meth:`CounterNoise.states`.
        ids: ``Long[V]`` target ids.

    Returns:
        ``float32[B, S, V]``, all positive. Works slot by slot, in int32 (the bits of :func:`_absorb`, twice as fast).
    """
    batch, slots = states.shape
    out = torch.empty(batch, slots, ids.shape[0], dtype=torch.float32, device=states.device)
    words = _wrap(ids) * _signed(0x9E3779B1)
    states = _wrap(states)[..., None]
    for slot in range(slots):
        bits = (states[:, slot] ^ words).add_(0x6A09E667)
        bits ^= (bits >> 16).bitwise_and_(0xFFFF)  # a shift without sign: int32 stands for uint32
        bits.mul_(_signed(0x85EBCA6B))
        bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
        bits.mul_(_signed(0xC2B2AE35))
        bits ^= (bits >> 16).bitwise_and_(0xFFFF)
        high = (bits >> 16).bitwise_and_(0xFFFF).float()
        u = high.mul_(65536.0).add_(bits.bitwise_and_(0xFFFF)).add_(0.5).mul_(2.0**-32)
        torch.log1p(u.clamp_(max=1.0 - 2.0**-24).neg_(), out=out[:, slot])
    return out.neg_()


def _wrap(x: Tensor) -> Tensor:
    """int64 to int32, keeping the low 32 bits."""
    return ((x + 0x80000000 & _MASK) - 0x80000000).to(torch.int32)


def _signed(x: int) -> int:
    """The int32 that has the bits of a uint32."""
    return x - (1 << 32) if x >= 1 << 31 else x
