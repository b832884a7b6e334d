"""Chi-square tests without scipy."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value of observed ``counts`` against weights ``expected``. Cells that expect fewer than 5 are merged.

    A count where nothing is expected gives 0.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if counts[expected == 0].sum() > 0:
        return 0.0
    expected = expected / expected.sum() * counts.sum()
    small = expected < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    counts, expected = counts[keep], expected[keep]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
