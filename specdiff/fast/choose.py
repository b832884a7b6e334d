"""Which fast path a model takes: packed kernels on the CPU, recorded passes on CUDA devices."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedError
from specdiff.fast.graphs import GraphTarget
from specdiff.fast.target import FastTarget

FastPath = FastTarget | GraphTarget


def fast_path(model: PreTrainedModel, fast: str, device: torch.device) -> tuple[FastPath | None, str | None]:
    """The fast path of ``model`` on ``device``, or None and why not (nothing to say under ``"off"``).

    Args:
        model: the target.
        fast: ``auto``, ``on`` or ``off``.
        device: where its token ids go in.

    Raises:
        UnsupportedError: ``fast="on"`` and there is none; the message says why.
    """
    if fast == "off":
        return None, None
    if device.type == "cuda" and fast == "auto":
        return None, "general path: passes are recorded as CUDA graphs with fast='on' only"
    try:
        return (GraphTarget(model) if device.type == "cuda" else FastTarget(model)), None
    except UnsupportedError as error:
        if fast == "on":
            raise
        return None, str(error)
