"""The cost curve: what a target pass over several inputs costs relative to one, and when speculation breaks even."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any


@dataclass
class CostCurve:
    """Median seconds of one pass.

    Attributes:
        context: committed tokens when measured.
        batch_size: rows per pass.
        path: the target path measured (``general`` or ``fast``).
        target: seconds of a target pass by number of inputs per row.
        drafter: seconds of a proposal and its commit by number of drafted tokens; empty without a drafter.
        block_size: K of the drafter, 0 without one.
        warm: seconds that a committed token costs the drafter when nothing is drafted.
        prefill: seconds of a target pass per prompt token.
    """

    context: int
    batch_size: int
    path: str
    target: dict[int, float]
    drafter: dict[int, float]
    block_size: int
    warm: float = 0.0
    prefill: float = 0.0

    def target_at(self, inputs: int) -> float:
        """Seconds of a target pass over ``inputs``, between the measured points by straight lines."""
        return interpolate(self.target, inputs)

    def drafter_at(self, tokens: int) -> float:
        """Seconds of a proposal of ``tokens``; 0 without a drafter."""
        return interpolate(self.drafter, tokens) if self.drafter and tokens else 0.0

    def rising(self) -> CostCurve:
        """The same, with measured points that dip below a smaller one lifted to it."""
        return replace(self, target=_rising(self.target), drafter=_rising(self.drafter))

    def break_even(self, block: int | None = None) -> float | None:
        """The tau at which rounds of ``block`` drafted tokens (K when None) cost what plain decoding costs per token.

        A round costs a target pass over block + 1 inputs and a draft; plain decoding pays one pass over 1 input per
        token. None without a drafter.
        """
        size = self.block_size if block is None else block
        if not size or not self.drafter:
            return None
        return (self.target_at(size + 1) + self.drafter_at(size)) / self.target_at(1)

    def round_cost(self, lengths: dict[int, int], most: int | None = None) -> float | None:
        """Mean cost of a round relative to a target pass over one input: the tau at which drafting so breaks even.

        Args:
            lengths: how many rounds drafted each number of tokens.
            most: longer proposals are cut to this.
        """
        rounds = sum(lengths.values())
        if not rounds or not self.drafter:
            return None
        seconds = 0.0
        for length, count in lengths.items():
            size = length if most is None else min(length, most)
            seconds += count * (self.target_at(size + 1) + self.drafter_at(max(1, size)))
        return seconds / rounds / self.target_at(1)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> CostCurve:
        """The curve that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no such dictionary.
        """
        target, drafter = ({int(n): float(s) for n, s in found[name].items()} for name in ("target", "drafter"))
        if min(target.values()) <= 0:
            raise ValueError("a pass takes time")
        return cls(
            context=int(found["context"]),
            batch_size=int(found["batch_size"]),
            path=str(found["path"]),
            target=target,
            drafter=drafter,
            block_size=int(found["block_size"]),
            warm=float(found["warm"]),
            prefill=float(found["prefill"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the curves relative to a target pass over one input."""
        one = self.target_at(1)
        return asdict(self) | {
            "target": {str(n): seconds for n, seconds in self.target.items()},
            "drafter": {str(n): seconds for n, seconds in self.drafter.items()},
            "target_relative": {str(n): seconds / one for n, seconds in self.target.items()},
            "drafter_relative": {str(n): seconds / one for n, seconds in self.drafter.items()},
            "break_even_tau": self.break_even(),
        }


def _rising(points: dict[int, float]) -> dict[int, float]:
    known = sorted(points)
    return dict(zip(known, accumulate((points[n] for n in known), max), strict=True))


def interpolate(points: dict[int, float], at: float) -> float:
    """Value at ``at`` on the straight lines through ``points``; the outer lines go on beyond the ends."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    right = next((i for i, n in enumerate(known) if n >= at and i), len(known) - 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
