"""The joint law of two draws that share their exponential noise, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def coupling(q: Sequence[float], p: Sequence[float]) -> list[list[float]]:
    """``J[i][j] = P(argmin E/q = i, argmin E/p = j)`` for independent standard exponentials ``E``.

    For i = j it is ``1 / sum_k max(q_k/q_j, p_k/p_j)``. For i != j write ``r = E_i / E_j``, which must lie between
    ``p_i/p_j`` and ``q_i/q_j``; integrating ``E_j`` out leaves ``1 / c(r)^2`` with the piecewise linear
    ``c(r) = 1 + r + sum_{k != i,j} max(p_k/p_j, r q_k/q_i)``.

    Args:
        q, p: probabilities over the same ids; zeros are allowed.

    Returns:
        A matrix whose rows sum to q and columns to p.
    """
    size = len(q)
    joint = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(size):
            if q[i] <= 0 or p[j] <= 0:
                continue
            if i == j:
                joint[i][i] = 1.0 / sum(max(q[k] / q[i], p[k] / p[i]) for k in range(size))
            else:
                joint[i][j] = _off_diagonal(q, p, i, j)
    return joint


def _off_diagonal(q: Sequence[float], p: Sequence[float], i: int, j: int) -> float:
    low, high = bounds(q, p, i, j)
    if high <= low:
        return 0.0
    others = [k for k in range(len(q)) if k not in (i, j)]
    kinks = sorted(p[k] / p[j] * q[i] / q[k] for k in others if q[k] > 0)
    edges = [low, *(x for x in kinks if low < x < high), high]
    total = 0.0
    for a, b in pairwise(edges):
        middle = 2 * a + 1.0 if b == float("inf") else (a + b) / 2
        constant, slope = 1.0, 1.0
        for k in others:
            if p[k] / p[j] >= middle * q[k] / q[i]:
                constant += p[k] / p[j]
            else:
                slope += q[k] / q[i]
        if b == float("inf"):
            total += 1.0 / (slope * (constant + slope * a))
        else:
            total += (b - a) / ((constant + slope * a) * (constant + slope * b))
    return total


def bounds(q: Sequence[float], p: Sequence[float], i: int, j: int) -> tuple[float, float]:
    """Range of ``E_i / E_j`` in which i wins under q and j under p (i != j, ``q_i > 0``, ``p_j > 0``)."""
    return p[i] / p[j], (q[i] / q[j] if q[j] > 0 else float("inf"))


def representative(q: Sequence[float], p: Sequence[float], i: int, j: int) -> list[float]:
    """One vector of noise for which i wins under q and j under p; ``J[i][j]`` must be positive."""
    noise = [0.0] * len(q)
    if i == j:
        ratio = 1.0
    else:
        low, high = bounds(q, p, i, j)
        ratio = 2 * low + 1.0 if high == float("inf") else (low + high) / 2
    noise[i], noise[j] = ratio, 1.0
    for k in range(len(q)):
        if k not in (i, j):
            noise[k] = 1.5 * max(p[k] / p[j], ratio * q[k] / q[i]) + 1e-6
    return noise
