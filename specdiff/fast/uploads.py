"""Small host values on a device, without waiting for what runs there. Imports torch only, so drafters may use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[bool] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``torch.tensor(values)`` on ``device``.

    Made there directly it would be copied from pageable memory, for which the host waits until the stream is done.
    """
    tensor = torch.tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
