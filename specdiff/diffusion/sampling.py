"""Samplers: from logits to a proposed token and its probability, in the two conventions of the field."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdiff.diffusion.draws import Draws
from specdiff.diffusion.spec import Convention
from specdiff.errors import InvalidInputError


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters of one request.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely ids, or None.
        top_p: keep the smallest set with at least this mass, or None.
        convention: see :class:`~specdiff.diffusion.spec.DLMSpec`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    convention: Convention = "llada"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InvalidInputError(f"temperature must be >= 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInputError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidInputError(f"top_p must be in (0, 1], not {self.top_p}")


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """``-inf`` below the k-th largest logit; ties with it stay."""
    bound = torch.topk(logits, min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < bound, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """``-inf`` outside the smallest set of ids whose mass reaches ``p``; the most likely id always stays."""
    ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)
    mass = torch.softmax(ordered, -1).cumsum(-1)
    drop = mass - torch.softmax(ordered, -1) >= p
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k and top-p in the order of the convention ("dream": top-p first, otherwise top-k first)."""
    if sampling.convention == "dream":
        if sampling.top_p is not None and sampling.top_p < 1:
            logits = keep_top_p(logits, sampling.top_p)
        return logits if sampling.top_k is None else keep_top_k(logits, sampling.top_k)
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return logits


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tempered and filtered logits, whose softmax is the law that tokens are drawn from (T = 0: filters alone)."""
    if sampling.temperature > 0 and sampling.temperature != 1:
        logits = logits / sampling.temperature
    return filtered(logits, sampling)


def draw(logits: Tensor, sampling: Sampling, draws: Draws, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token per column and the logits that its confidence is read from.

    Args:
        logits: float32 ``[A, W, V]``, refused ids at ``-inf``.
        sampling: the request.
        draws: randomness.
        positions: ``Long[A, W]`` logical positions (keys of the noise).

    Returns:
        ``Long[A, W]`` tokens, and ``[A, W, V]`` logits of the confidence law: untempered for "llada", tempered and
        filtered otherwise.
    """
    if sampling.convention == "llada":
        law = filtered(logits, sampling)
        if sampling.temperature == 0:
            return law.argmax(-1), logits
        race = draws.race(positions, logits.shape[-1]).double()
        return (law.double() - sampling.temperature * race.log()).argmax(-1), logits
    law = warp(logits, sampling)
    if sampling.temperature == 0:
        return law.argmax(-1), law
    return draws.categorical(law, positions), law


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """``float32[A, W]`` softmax probability of ``tokens``."""
    picked = logits.gather(-1, tokens[..., None])[..., 0]
    return torch.exp(picked - torch.logsumexp(logits, -1))


def entropy(logits: Tensor) -> Tensor:
    """``float32[A, W]`` entropy in nats; ids at ``-inf`` count nothing."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """``float32[A, W]`` probability of the most likely id minus that of the second."""
    top = torch.softmax(logits, -1).topk(min(2, logits.shape[-1]), dim=-1).values
    return top[..., 0] - top[..., -1] if top.shape[-1] == 2 else top[..., 0]
