"""Block caches: which positions are computed anew in a pass. Everything else is read from the scatter cache.

Each cache says whether it is exact, that is, whether decoding gives the logits of decoding without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion.canvas import Canvas
from specdiff.diffusion.select import top
from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import InvalidInputError, UnsupportedError


@dataclass
class PlanInput:
    """What a plan may look at, for ``A`` rows of ``N`` positions.

    Attributes:
        canvas: the rows.
        start: ``Long[A]`` first position of the open block.
        end: ``Long[A]`` one past it.
        sub: ``Bool[A, N]`` the first sub-block with noise in it.
        step: ``Long[A]`` pass of the block.
        passes: ``Long[A]`` pass of the row.
        visible: ``Bool[A, N]`` positions that exist for this pass.
        known: ``Bool[A, N]`` keys and values were computed at least once.
        fresh: ``Bool[A, N]`` they were computed with the final token in final surroundings (exact).
        want: ``Bool[A, N]`` positions whose prediction the policy reads.
        seen_confidence: ``[A, N]`` the last confidence of every noisy position.
    """

    canvas: Canvas
    start: Tensor
    end: Tensor
    sub: Tensor
    step: Tensor
    passes: Tensor
    visible: Tensor
    known: Tensor
    fresh: Tensor
    want: Tensor
    seen_confidence: Tensor

    @property
    def position(self) -> Tensor:
        """``Long[N]``."""
        return self.canvas.positions


@dataclass(frozen=True)
class BlockCache:
    """Base of all caches.

    Class attributes:
        name: what users write.
        exact: decoding equals decoding without a cache.
        stores: keeps keys and values at all.
        limits_wants: only queried positions can be predicted, so the policy sees fewer.
    """

    name: ClassVar[str] = "none"
    exact: ClassVar[bool] = True
    stores: ClassVar[bool] = False
    limits_wants: ClassVar[bool] = False

    def check(self, spec: DLMSpec) -> None:
        """Refuse models for which the cache makes no sense."""

    def plan(self, x: PlanInput) -> Tensor:
        """``Bool[A, N]`` positions to compute: here all of them."""
        return x.visible


@dataclass(frozen=True)
class ExactBlock(BlockCache):
    """Keys and values of closed blocks are kept; the open block is computed each pass.

    The clean pass of a block that has just closed shares the first pass of the next one.
    """

    name: ClassVar[str] = "block"
    stores: ClassVar[bool] = True

    def check(self, spec: DLMSpec) -> None:
        if spec.attention == "full":
            raise UnsupportedError(
                "cache 'block' is exact only where blocks are causal; this model has full attention: "
                "use 'prefix', 'dual', 'delayed' or 'certainty' (approximate), or 'none'"
            )

    def plan(self, x: PlanInput) -> Tensor:
        return x.visible & ((x.position >= x.start[:, None]) | ~x.fresh)


@dataclass(frozen=True)
class SubBlockCache(ExactBlock):
    """Fast-dLLM v2: the block is computed when its sub-block's first token is noisy, otherwise the sub-block alone."""

    name: ClassVar[str] = "sub_block"
    exact: ClassVar[bool] = False

    def plan(self, x: PlanInput) -> Tensor:
        first = x.sub & (x.sub.long().cumsum(-1) == 1)
        rebuild = (first & x.canvas.noisy).any(-1, keepdim=True) | (x.step == 0)[:, None]
        inside = x.position >= x.start[:, None]
        return x.visible & ((inside & (rebuild | x.sub)) | (~inside & ~x.fresh))


def _whole_at_start(x: PlanInput, rest: Tensor) -> Tensor:
    return x.visible & ((x.step == 0)[:, None] | rest)


@dataclass(frozen=True)
class Prefix(BlockCache):
    """Fast-dLLM v1 prefix cache: a full pass when a block opens, then the block and all that follows it."""

    name: ClassVar[str] = "prefix"
    exact: ClassVar[bool] = False
    stores: ClassVar[bool] = True

    def plan(self, x: PlanInput) -> Tensor:
        return _whole_at_start(x, x.position >= x.start[:, None])


@dataclass(frozen=True)
class Dual(BlockCache):
    """Fast-dLLM v1 DualCache: a full pass when a block opens, then the block alone, replaced in place."""

    name: ClassVar[str] = "dual"
    exact: ClassVar[bool] = False
    stores: ClassVar[bool] = True

    def plan(self, x: PlanInput) -> Tensor:
        inside = (x.position >= x.start[:, None]) & (x.position < x.end[:, None])
        return _whole_at_start(x, inside)


@dataclass(frozen=True)
class Delayed(BlockCache):
    """dKV-Cache (Ma et al. 2025): everything in the first two passes and every ``interval`` passes, otherwise all
    but what
    was decoded at least two passes ago: a token is computed once more after it was decided, then frozen."""

    name: ClassVar[str] = "delayed"
    exact: ClassVar[bool] = False
    stores: ClassVar[bool] = True
    interval: int = 8

    def check(self, spec: DLMSpec) -> None:
        if self.interval < 1:
            raise InvalidInputError(f"cache 'delayed': interval must be at least 1, not {self.interval}")

    def plan(self, x: PlanInput) -> Tensor:
        everything = (x.passes <= 1) | (x.passes % self.interval == 0)
        frozen = x.canvas.age <= (x.passes - 2)[:, None]
        return x.visible & (everything[:, None] | ~frozen)


@dataclass(frozen=True)
class Certainty(BlockCache):
    """d2Cache (Jiang et al. 2025), without its optional attention-rollout nucleus: the ``k`` masks with the highest
    confidence times certainty density, and what was just decoded.

    The density of a mask is the sum over clean positions of ``exp(-distance^2 / (2 sigma^2))``. With ``k`` at least
    the row's
    length everything is computed, and the cache is exact.
    """

    name: ClassVar[str] = "certainty"
    exact: ClassVar[bool] = False
    stores: ClassVar[bool] = True
    limits_wants: ClassVar[bool] = True
    k: int = 32
    sigma: float = 10.0

    def check(self, spec: DLMSpec) -> None:
        if self.k < 1 or not self.sigma > 0:
            raise InvalidInputError(f"cache 'certainty': k >= 1 and sigma > 0, not {self.k}, {self.sigma}")

    def plan(self, x: PlanInput) -> Tensor:
        noisy = x.canvas.noisy & x.visible
        clean = (~x.canvas.noisy & x.visible).float()
        gap = (x.position[:, None] - x.position[None, :]).float()
        density = clean @ torch.exp(-(gap**2) / (2 * self.sigma**2))
        # only masks that the policy asks for compete; one of them is always there
        count = torch.full_like(x.passes, self.k)
        chosen = top(x.seen_confidence.clamp(min=1e-6) * density, noisy & x.want, count)
        just = x.canvas.age == (x.passes - 1)[:, None]
        whole = (x.passes == 0) | (self.k >= x.canvas.length)
        return x.visible & (whole[:, None] | chosen | just)


CACHES: dict[str, type[BlockCache]] = {
    c.name: c for c in (BlockCache, ExactBlock, SubBlockCache, Prefix, Dual, Delayed, Certainty)
}


def make_cache(cache: str | BlockCache, spec: DLMSpec) -> BlockCache:
    """The cache of that name, checked against the model."""
    if isinstance(cache, str):
        if cache not in CACHES:
            raise InvalidInputError(f"unknown cache {cache!r}; known: {', '.join(sorted(CACHES))}")
        cache = CACHES[cache]()
    if spec.commit == "encoder" and type(cache) is not ExactBlock:
        raise UnsupportedError(f"{spec.name}: its encoder writes the cache; only cache='block' exists for it")
    cache.check(spec)
    return cache
