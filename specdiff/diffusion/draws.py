"""Random draws of the decoder, independent per row and repeatable.

The default is counter noise (:mod:`specdiff.verify.noise`): a number is a pure function of the row's seed, its
purpose, the
row's pass and the position, so that row ``r`` of a batch equals its solo run. :class:`TorchDraws` takes torch's global
generator instead, in the order of Hugging Face's own DiffusionGemma loop.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specdiff.verify.noise import CounterNoise, Noise, Purpose

TOKEN = Purpose.DRAFT
"""Draws of tokens."""
CHOICE = Purpose.ACCEPT
"""Draws that choose positions."""
RENOISE = Purpose.RESIDUAL
"""Fresh random tokens of a uniform canvas."""
REMASK = Purpose.BONUS
"""Draws that choose positions to remask."""

_PASS_BITS = 18


class Draws(Protocol):
    """Randomness of one pass for ``A`` rows and ``W`` columns."""

    def select(self, rows: Tensor) -> Draws:
        """The draws of a subset of rows: ``Long[a]``."""
        ...

    def race(self, positions: Tensor, vocab: int) -> Tensor:
        """``float32[A, W, vocab]`` standard exponentials for drawing tokens at ``positions``: ``Long[A, W]``."""
        ...

    def uniform(self, purpose: Purpose, positions: Tensor, count: int = 1) -> Tensor:
        """``float64[A, W, count]`` uniform in [0, 1)."""
        ...

    def categorical(self, logits: Tensor, positions: Tensor) -> Tensor:
        """``Long[A, W]`` draws from softmax(``logits``): ``[A, W, V]``."""
        ...

    def random_ids(self, purpose: Purpose, positions: Tensor, vocab: int) -> Tensor:
        """``Long[A, W]`` uniform ids below ``vocab``."""
        ...


class CounterDraws:
    """Counter-based draws.

    Args:
        noise: one seed per row (:class:`specdiff.verify.noise.Noise`).
        passes: ``Long[A]`` number of the row's current pass; part of every key.
    """

    def __init__(self, noise: Noise, passes: Tensor) -> None:
        self.noise = noise
        self.passes = passes

    def select(self, rows: Tensor) -> CounterDraws:
        return CounterDraws(self.noise.select(rows), self.passes[rows])

    def _flat(self, positions: Tensor) -> CounterNoise:
        """One virtual row per column."""
        rows, width = positions.shape
        seeds = self.noise.seeds[:, None].expand(rows, width).reshape(-1)
        key = (self.passes[:, None] << _PASS_BITS) + positions
        return Noise(seeds).round(key.reshape(-1))

    def race(self, positions: Tensor, vocab: int) -> Tensor:
        ids = torch.arange(vocab, device=positions.device)
        return self._flat(positions).exponential(TOKEN, 1, ids).view(*positions.shape, vocab)

    def uniform(self, purpose: Purpose, positions: Tensor, count: int = 1) -> Tensor:
        return self._flat(positions).uniform(purpose, count).view(*positions.shape, count)

    def categorical(self, logits: Tensor, positions: Tensor) -> Tensor:
        race = self.race(positions, logits.shape[-1])
        return (torch.log_softmax(logits.float(), -1) - race.log()).argmax(-1)

    def random_ids(self, purpose: Purpose, positions: Tensor, vocab: int) -> Tensor:
        return (self.uniform(purpose, positions)[..., 0] * vocab).long().clamp_(max=vocab - 1)


class TorchDraws:
    """Draws from torch's global generator (or ``generator``), in Hugging Face's order. Rows are not independent."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def select(self, rows: Tensor) -> TorchDraws:
        return self

    def race(self, positions: Tensor, vocab: int) -> Tensor:
        out = torch.empty(*positions.shape, vocab, device=positions.device)
        return out.exponential_(generator=self.generator)

    def uniform(self, purpose: Purpose, positions: Tensor, count: int = 1) -> Tensor:
        shape = (*positions.shape, count)
        return torch.rand(shape, device=positions.device, dtype=torch.float64, generator=self.generator)

    def categorical(self, logits: Tensor, positions: Tensor) -> Tensor:
        law = torch.softmax(logits, -1, dtype=torch.float32).reshape(-1, logits.shape[-1])
        return torch.multinomial(law, 1, generator=self.generator).view(positions.shape)

    def random_ids(self, purpose: Purpose, positions: Tensor, vocab: int) -> Tensor:
        return torch.randint(0, vocab, tuple(positions.shape), device=positions.device, generator=self.generator)
