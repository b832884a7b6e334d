"""Small helpers around targets and wrapped pairs."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from specdiff.drafters.base import Drafter
from specdiff.wrap import SpecDiff


def pad_token_of(model: PreTrainedModel) -> int:
    """The id that fills batches: the padding token, else an end token, else 0."""
    for value in (model.generation_config.pad_token_id, model.generation_config.eos_token_id):
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def redrafted(wrapped: SpecDiff, drafter: Drafter | None, block_size: int | str | None = None) -> SpecDiff:
    """The same target, with whatever has been prepared for it, and another drafter."""
    other = copy.copy(wrapped)
    other.drafter = drafter
    other.set_block(block_size)
    return other
