"""Classifier-free guidance: one doubled pass, with the prompt masked in the second half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdiff.diffusion.denoiser import DenoiserLike, PassInput
from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import InvalidInputError, UnsupportedError


class GuidedDenoiser:
    """``l = u + (s + 1)(l - u)``, with ``u`` the logits with the prompt masked (LLaDA, SMDM).

    Args:
        inner: the denoiser.
        scale: ``s``; 0 is no guidance.
    """

    def __init__(self, inner: DenoiserLike, scale: float) -> None:
        if inner.spec.mask_id is None or inner.spec.commit == "encoder":
            raise UnsupportedError(f"{inner.spec.name}: guidance masks the prompt, which this model cannot do")
        if not scale >= 0:
            raise InvalidInputError(f"cfg_scale must be >= 0, not {scale}")
        self.inner = inner
        self.scale = scale
        self.prompt: Tensor | None = None

    @property
    def spec(self) -> DLMSpec:
        """As the inner denoiser's."""
        return self.inner.spec

    @property
    def vocab_size(self) -> int:
        """As the inner denoiser's."""
        return self.inner.vocab_size

    @property
    def supports_cache(self) -> bool:
        """As the inner denoiser's."""
        return self.inner.supports_cache

    @property
    def device(self) -> torch.device:
        """As the inner denoiser's."""
        return self.inner.device

    def new_cache(self, rows: int, capacity: int) -> Any:
        """A cache for both halves."""
        return self.inner.new_cache(2 * rows, capacity)

    def select(self, cache: Any, rows: Tensor) -> None:
        """Keep ``rows`` of both halves."""
        assert self.prompt is not None
        self.inner.select(cache, torch.cat([rows, rows + self.prompt.shape[0]]))
        self.prompt = self.prompt[rows]

    def logits(self, batch: PassInput, cache: Any = None) -> Tensor:
        """Guided logits."""
        assert self.prompt is not None and self.spec.mask_id is not None
        blind = torch.where(self.prompt, self.spec.mask_id, batch.ids)
        both = self.inner.logits(batch.doubled(blind), cache)
        told, untold = both.chunk(2)
        return untold + (self.scale + 1.0) * (told - untold)
