"""Forced words: phrases that must appear, each placed where the model finds it likeliest."""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.diffusion.policies.base import View
from specdiff.diffusion.state import RowState


def best_place(log_p: Tensor, free: Tensor, positions: Tensor, phrase: Tensor) -> int | None:
    """Column at which ``phrase`` starts with the highest total log-probability, or None if it fits nowhere.

    Args:
        log_p: ``[W, V]`` log-probabilities.
        free: ``Bool[W]`` columns that may be taken.
        positions: ``Long[W]`` their positions, ascending; a phrase needs neighbours.
        phrase: ``Long[n]``.
    """
    n = len(phrase)
    if n > len(free):
        return None
    spans = positions.unfold(0, n, 1)
    fits = free.unfold(0, n, 1).all(-1) & (spans[:, -1] - spans[:, 0] == n - 1)
    if not bool(fits.any()):
        return None
    score = log_p[:, phrase].unfold(0, n, 1).diagonal(dim1=1, dim2=2).sum(-1)
    return int(torch.where(fits, score, -torch.inf).argmax())


def place_words(s: RowState, index: Tensor, view: View) -> Tensor:
    """Place waiting phrases into the open blocks; placed tokens are fixed.

    Args:
        s: all rows, changed in place.
        index: ``Long[a]`` rows of the view.
        view: their columns after a pass.

    Returns:
        ``Bool[a]`` rows in which something was placed.
    """
    placed = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    log_p = torch.log_softmax(view.logits, -1)
    for i, row in enumerate(index.tolist()):
        free = view.open[i] & (view.positions[i] < int(s.limit[row]))
        left: list[Tensor] = []
        for phrase in sorted(s.words[row], key=len, reverse=True):
            at = best_place(log_p[i], free, view.positions[i], phrase)
            if at is None:
                left.append(phrase)
                continue
            columns = torch.arange(at, at + len(phrase), device=free.device)
            where = view.positions[i][columns]
            c = s.canvas
            c.ids[row, where] = phrase
            c.noisy[row, where] = False
            c.fixed[row, where] = True
            c.age[row, where] = s.passes[row]
            c.confidence[row, where] = log_p[i][columns, phrase].exp()
            free[columns] = False
            placed[i] = True
        s.words[row] = left
        inside = (s.canvas.positions >= s.start[row]) & (s.canvas.positions < s.end[row])
        s.opened[row] = bool((s.canvas.noisy[row] & ~s.canvas.fixed[row] & inside).any())
    return placed
