"""The cost curve: what a target pass over several inputs costs relative to one, and when speculation breaks even."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdiff.bench.arms import synchronise
from specdiff.drafters.base import DraftRequest
from specdiff.target import Target
from specdiff.verify import Noise, row_seeds
from specdiff.wrap import SpecDiff

INPUTS = (1, 2, 4, 8, 16, 24)
REPEATS = 9
BUDGET = 3.0
"""Seconds after which no more than ``REPEATS`` are made; quick passes are repeated up to ten times as often."""


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
    """

    context: int
    batch_size: int
    path: str
    target: dict[int, float]
    drafter: dict[int, float]
    block_size: int

    def target_at(self, inputs: int) -> float:
        """Seconds of a target pass over ``inputs``, between the measured points by straight lines."""
        return interpolate(self.target, inputs)

    def drafter_at(self, tokens: int) -> float:
        """Seconds of a proposal of ``tokens``; 0 without a drafter."""
        return interpolate(self.drafter, tokens) if self.drafter and tokens else 0.0

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


def interpolate(points: dict[int, float], at: float) -> float:
    """Value at ``at`` on the straight lines through ``points``; the outer lines go on beyond the ends."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    right = next((i for i, n in enumerate(known) if n >= at and i), len(known) - 1)
    low, high = known[right - 1], known[right]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


def measure_cost(
    wrapped: SpecDiff,
    target: Target | None = None,
    *,
    inputs: Sequence[int] = INPUTS,
    context: int = 192,
    batch_size: int = 1,
    repeats: int = REPEATS,
    budget: float = BUDGET,
    seed: int = 0,
) -> CostCurve:
    """Measure passes of target and drafter on random ids, sizes interleaved, medians over ``repeats``.

    Args:
        wrapped: the pair.
        target: the target path to measure; the one that plain requests take when None.
        inputs: numbers of inputs per row.
        context: committed tokens before each pass.
        batch_size: rows.
        repeats: least measurements per size, one more is thrown away; quick passes get up to ten times as many.
        budget: seconds that quick passes may take beyond that, per curve.
        seed: of the random ids.
    """
    if target is None:
        target, _ = wrapped.target_for(context + max(*inputs, wrapped.block_size) + 2)
    device = target.device
    block = wrapped.block_size
    wanted = sorted({1, *inputs} | ({block + 1} if block else set()))
    if target.max_positions is not None:
        context = max(1, min(context, target.max_positions - max(wanted) - 1))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.vocab_size, (batch_size, context + max(wanted)), generator=generator).to(device)
    drafter = wrapped.drafter
    taps = tuple(drafter.taps) if drafter is not None else ()
    capacity = context + max(wanted) + 1
    counts = torch.full((batch_size,), context, device=device)
    with torch.no_grad():
        state = target.open(batch_size, capacity, taps)
        try:
            states = state.forward(ids[:, :context], counts, head="last").taps
            state.advance([context] * batch_size)

            def target_pass(size: int) -> None:
                state.forward(ids[:, context : context + size], torch.full((batch_size,), size, device=device))

            curve = _medians(target_pass, wanted, repeats, budget, device)
            if drafter is None:
                return CostCurve(context, batch_size, target.name, curve, {}, 0)
            request = DraftRequest(
                batch_size=batch_size,
                device=device,
                dtype=target.dtype,
                vocab_size=target.vocab_size,
                capacity=capacity,
                target_cache=state,
                rule="greedy",
            )
            session = drafter.start(request)
            try:
                session.commit(ids[:, :context], counts, states)
                anchor, base = ids[:, context], counts
                noise = Noise(row_seeds(seed, batch_size, device)).round(counts + 1)
                fresh = state.forward(ids[:, context : context + 2], torch.full_like(counts, 2)).taps

                def draft(size: int) -> None:
                    session.propose(anchor, torch.full_like(counts, size), noise)
                    session.commit(ids[:, context : context + 2], torch.full_like(counts, 2), fresh)
                    session.rollback(base)

                sizes = sorted({n for n in inputs if n <= block} | {block})
                return CostCurve(
                    context, batch_size, target.name, curve, _medians(draft, sizes, repeats, budget, device), block
                )
            finally:
                session.close()
        finally:
            state.close()


def _medians(
    call: Callable[[int], None], sizes: Sequence[int], repeats: int, budget: float, device: torch.device
) -> dict[int, float]:
    """Median seconds of ``call(size)``; each size twice in a row, the second one timed."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    start = time.perf_counter()
    for turn in range(10 * repeats + 1):
        if turn > repeats and time.perf_counter() - start >= budget:
            break
        for size in sizes:
            call(size)  # the same shape just before: caches hold what a running loop would find
            synchronise(device)
            began = time.perf_counter()
            call(size)
            synchronise(device)
            if turn:
                times[size].append(time.perf_counter() - began)
    return {size: statistics.median(values) for size, values in times.items()}
