"""From public checkpoints to native classes and :class:`~specdiff.diffusion.spec.DLMSpec` values."""

from __future__ import annotations

from specdiff.diffusion.checkpoints.build import denoiser_for, spec_for
from specdiff.diffusion.checkpoints.registry import load

__all__ = ["denoiser_for", "load", "spec_for"]
