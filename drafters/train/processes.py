"""The processes of a run (accelerate): one, or as many as ``accelerate launch`` or ``torchrun`` started."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import PartialState

PATIENCE = timedelta(days=7)
"""How long processes wait for one that writes text or reads it; the usual half hour is less than such a stage takes."""


def processes(cpu: bool) -> PartialState:
    """This process among the others; the first call decides on the device, and joins them.

    Args:
        cpu: whether the run is on the CPU.
    """
    from accelerate import PartialState

    return PartialState(cpu=cpu, timeout=PATIENCE)
