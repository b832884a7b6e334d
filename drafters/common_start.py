"""What two texts of token ids have in common at their start: what need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are equal."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
