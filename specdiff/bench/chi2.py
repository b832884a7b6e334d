"""Chi-square distributions and a goodness-of-fit test with its power, on torch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from specdiff.errors import InvalidInputError

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are merged (Cochran's rule)."""


@dataclass(frozen=True)
class FitTest:
    """One chi-square goodness-of-fit test.

    Attributes:
        name: what was tested.
        statistic: sum of (observed - expected)^2 / expected over the merged cells.
        freedom: degrees of freedom; 0 when the law has one cell only and nothing can be tested.
        p_value: probability of a statistic this large under the law; 1 when ``freedom`` is 0.
        impossible: draws that the law gives probability zero. Any is a failure.
        detectable: total variation (over the merged cells) from which on a bias is found with the stated power.
    """

    name: str
    statistic: float
    freedom: int
    p_value: float
    impossible: int
    detectable: float | None


def chi2_sf(x: float, freedom: float) -> float:
    """P(X > x) for a chi-square variable: the regularised upper incomplete gamma function Q(freedom/2, x/2)."""
    if x <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi2_critical(alpha: float, freedom: int) -> float:
    """The x with P(X > x) = alpha, by bisection."""
    low, high = 0.0, freedom + 10.0
    while chi2_sf(high, freedom) > alpha:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if chi2_sf(middle, freedom) > alpha:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def noncentral_sf(x: float, freedom: int, noncentrality: float) -> float:
    """P(X > x) for a noncentral chi-square variable, as its Poisson mixture of central ones."""
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 30
    first, last = max(0, int(mean - spread)), int(mean + spread)
    order = torch.arange(first, last + 1, dtype=torch.float64)
    log_mean = math.log(mean) if mean > 0 else -math.inf
    logs = order * log_mean - mean - torch.lgamma(order + 1) if mean > 0 else torch.where(order == 0, 0.0, -math.inf)
    tails = torch.special.gammaincc(freedom / 2 + order, torch.tensor(x / 2, dtype=torch.float64))
    return float((logs.exp() * tails).sum().clamp(0, 1))


@lru_cache(maxsize=1024)
def detectable_variation(draws: int, freedom: int, alpha: float, power: float) -> float:
    """Smallest total variation that a test is sure to find with probability ``power``.

    A bias with density ratio 1 + d has chi-square distance E[d^2] >= E[|d|]^2 = 4 TV^2, so every bias with total
    variation TV gives a noncentrality of at least 4 n TV^2 for n ``draws``. Solves power(4 n TV^2) = ``power``.
    """
    critical = chi2_critical(alpha, freedom)
    low, high = 0.0, 1.0
    while noncentral_sf(critical, freedom, high) < power:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if noncentral_sf(critical, freedom, middle) < power:
            low = middle
        else:
            high = middle
    return min(1.0, math.sqrt(high / (4 * draws)))


def fit_test(
    name: str, observed: Sequence[int], probabilities: Sequence[float], *, alpha: float = 0.01, power: float = 0.9
) -> FitTest:
    """Chi-square test of counts against a law.

    Args:
        name: what is tested.
        observed: count of each cell.
        probabilities: its probability under the law; they sum to 1.
        alpha: level at which a failure would be declared, for the power statement.
        power: wanted probability of finding a bias, for the power statement.

    Raises:
        InvalidInputError: lists of unequal length, or no draws.
    """
    if len(observed) != len(probabilities):
        raise InvalidInputError(f"{len(observed)} counts for {len(probabilities)} cells")
    draws = sum(observed)
    if draws < 1:
        raise InvalidInputError("a chi-square test needs draws")
    impossible = sum(count for count, p in zip(observed, probabilities, strict=True) if p <= 0)
    cells = sorted((p * draws, count) for count, p in zip(observed, probabilities, strict=True) if p > 0)
    merged: list[tuple[float, int]] = []
    expected, seen = 0.0, 0
    for cell_expected, cell_seen in cells:  # rare cells first, pooled until they hold enough
        expected, seen = expected + cell_expected, seen + cell_seen
        if expected >= MIN_EXPECTED:
            merged.append((expected, seen))
            expected, seen = 0.0, 0
    if expected > 0:
        last = merged.pop() if merged else (0.0, 0)
        merged.append((last[0] + expected, last[1] + seen))
    freedom = len(merged) - 1
    statistic = sum((count - mean) ** 2 / mean for mean, count in merged)
    if freedom < 1:
        return FitTest(name, statistic, 0, 1.0, impossible, None)
    found = detectable_variation(draws, freedom, alpha, power)
    return FitTest(name, statistic, freedom, chi2_sf(statistic, freedom), impossible, found)
