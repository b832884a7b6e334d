"""Fused verification and draft sampling in Triton.

Nothing here is needed to use :mod:`specdiff.verify`; triton is imported when a kernel is first called. Each kernel has
its torch twin in :mod:`specdiff.verify.kernels.twin`, which says what the kernel must compute.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import traceback
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff.verify.noise import CounterNoise

if TYPE_CHECKING:
    from specdiff.verify.laws import Proposal, Verdict
    from specdiff.verify.noise import Purpose, RoundNoise

__all__ = ["attempt", "available", "fused_sample", "fused_verify", "inverse_ids", "serve"]

log = logging.getLogger(__name__)

_refused: set[str] = set()
"""Reasons for which kernels failed to start in this process; once there is one, torch does their work."""


def inverse_ids(draft_ids: Tensor, vocab: int) -> Tensor:
    """``Int[vocab]`` column of each target id in a pruned draft vocabulary; see the twin."""
    from specdiff.verify.kernels.twin import inverse_ids as of_twin

    return of_twin(draft_ids, vocab)


def serve(scores: Tensor, noise: RoundNoise) -> bool:
    """Whether :func:`specdiff.verify.verify` should run as kernels: CUDA, triton, counter noise, at most float32.

    ``SPECDIFF_KERNELS=off`` in the environment keeps torch.
    """
    return (
        scores.is_cuda
        and scores.dtype != torch.float64
        and isinstance(noise, CounterNoise)
        and not _refused
        and os.environ.get("SPECDIFF_KERNELS") != "off"
        and available()
    )


def attempt(rule: str, scores: Tensor, proposal: Proposal, noise: RoundNoise) -> Verdict | None:
    """:func:`fused_verify` without a temperature, or None, said once, where kernels cannot be built or started.

    Any other error is raised: it is a fault, and torch in its place would hide it.
    """
    assert isinstance(noise, CounterNoise)
    try:
        return fused_verify(rule, scores, proposal, noise)
    except Exception as error:  # triton's errors and its compilers' share no base; what is no failed start is raised
        if not cannot_start(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
        _refused.add(reason)
        log.warning("the verification kernels do not start here, torch is used instead (%s)", reason)
        return None


def cannot_start(error: Exception) -> bool:
    """Whether an error of a launch means that triton cannot compile or start here.

    Triton has classes of its own for code that it cannot compile or that does not fit the device. Without a driver or
    a compiler it raises plain ``RuntimeError``, which torch raises too: there the frame that raised it decides. A
    compiler that fails is a ``CalledProcessError``, one that is not there or a cache that cannot be written an
    ``OSError``.
    """
    if any(kind.__module__.startswith("triton.") for kind in type(error).__mro__):
        return True
    if isinstance(error, ImportError):
        return not (error.name or "").startswith("specdiff")
    if isinstance(error, RuntimeError):
        names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        return bool(names) and names[-1].startswith("triton.")
    return isinstance(error, (OSError, subprocess.SubprocessError))


def available() -> bool:
    """Whether triton is installed. Running its kernels also needs a GPU or ``TRITON_INTERPRET=1``."""
    return importlib.util.find_spec("triton") is not None


def fused_verify(
    rule: str,
    logits: Tensor,
    proposal: Proposal,
    noise: CounterNoise,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
    inverse: Tensor | None = None,
) -> Verdict:
    """:func:`specdiff.verify.verify` of ``logits / temperature`` without any ``[B, K, V]`` intermediate.

    Args:
        rule: one of :data:`specdiff.verify.RULES`.
        logits: ``[B, K+1, V]`` target logits, any float dtype and strides; -inf is impossible.
        proposal: the drafted block. ``proposal.logits`` are divided by ``draft_temperature``.
        noise: the round's counter noise; the same bits as in torch.
        temperature, draft_temperature: positive.
        inverse: ``Int[V]`` from :func:`inverse_ids`, when the draft vocabulary is pruned; made on the fly if missing.

    Returns:
        The verdict, equal to the twin's but for ties within float32 rounding.

    Raises:
        InvalidInputError, UnsupportedError: as the twin.
    """
    from specdiff.verify.kernels.launch import launch_verify

    return launch_verify(rule, logits, proposal, noise, temperature, draft_temperature, inverse)


def fused_sample(
    logits: Tensor,
    noise: CounterNoise | None,
    purpose: Purpose,
    temperature: float = 1.0,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of logits from ``softmax(logits / temperature)`` in one pass, no noise tensor written.

    Args:
        logits: ``[B, S, Vd]`` any float dtype and strides.
        noise: the round's counter noise, or None for the argmax.
        purpose: key of the noise: ``DRAFT``, or ``COUPLED`` for draws keyed by logical position.
        temperature: positive.
        ids: ``Long[Vd]`` target id of each column (also the noise's key); None where column v is id v.

    Returns:
        ``Long[B, S]`` target ids, and ``Bool[B, S]`` rows with NaN, +inf or nothing but -inf (their token is some id).
    """
    from specdiff.verify.kernels.launch import launch_sample

    return launch_sample(logits, noise, purpose, temperature, ids)
