"""Forced words: phrases that must appear, each placed where the model finds it likeliest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdiff.diffusion.policies.base import View
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.state import RowState
from specdiff.errors import InvalidInputError

_SEARCH = 20_000
"""Branches that the search for a packing may try."""


def packs(runs: Sequence[int], phrases: Sequence[int]) -> bool:
    """Whether phrases of these lengths fit side by side into runs of these lengths."""
    left = _SEARCH
    failed: set[tuple[int, tuple[int, ...]]] = set()
    need = sorted(phrases, reverse=True)
    rest = [sum(need[i:]) for i in range(len(need) + 1)]

    def search(at: int, room: tuple[int, ...]) -> bool:
        nonlocal left
        if at == len(need):
            return True
        room = tuple(sorted(r for r in room if r >= need[-1]))
        if sum(room) < rest[at] or (at, room) in failed or left <= 0:
            return False
        left -= 1
        tried = 0
        for i, run in enumerate(room):  # the tightest run first
            if run < need[at] or run == tried:
                continue
            tried = run
            if search(at + 1, (*room[:i], run - need[at], *room[i + 1 :])):
                return True
        failed.add((at, room))
        return False

    return search(0, tuple(runs))


def free_runs(s: RowState, spec: DLMSpec, row: int, start: int) -> list[int]:
    """Lengths of the runs of a row, from position ``start`` on, that phrases may take; no run crosses a block edge."""
    c = s.canvas
    position = c.positions
    free = c.noisy[row] & ~c.fixed[row] & (position >= start) & (position < s.limit[row])
    block = torch.zeros_like(position)
    if spec.block_size is not None:
        offset = position - s.origin[row]
        block = torch.div(offset, spec.block_size, rounding_mode="floor")
        if spec.first_token == "ar":  # such a block's first token comes from the clean pass
            free = free & ~((offset % spec.block_size == 0) & (position > 0))
    elif spec.first_token == "ar":
        free = free & ~((position == s.first[row]) & (position > 0))
    return _runs(zip(position[free].tolist(), block[free].tolist(), strict=True))


def check_words(s: RowState, spec: DLMSpec) -> None:
    """Refuse phrases that do not fit into what the blocks of a row leave free.

    Raises:
        InvalidInputError: naming the row and its free runs.
    """
    for row, phrases in enumerate(s.words):
        if not phrases:
            continue
        runs, lengths = free_runs(s, spec, row, 0), [len(p) for p in phrases]
        if not packs(runs, lengths):
            shown = ", ".join(map(str, runs[:20])) + (", ..." if len(runs) > 20 else "")
            raise InvalidInputError(
                f"force_words_ids: phrases of {', '.join(map(str, lengths))} tokens do not fit into row {row}, whose "
                f"blocks and fixed spans leave runs of {shown or 'no'} free tokens; raise max_new_tokens, split or "
                "drop phrases, or move the fixed spans"
            )


def best_place(
    log_p: Tensor, free: Tensor, positions: Tensor, phrase: Tensor, later: Sequence[int], others: Sequence[int]
) -> int | None:
    """Column at which ``phrase`` starts with the highest total log-probability, or None if it fits nowhere.

    Args:
        log_p: ``[W, V]`` log-probabilities.
        free: ``Bool[W]`` columns that may be taken.
        positions: ``Long[W]`` their positions, ascending; a phrase needs neighbours.
        phrase: ``Long[n]``.
        later: free runs of the blocks to come.
        others: lengths of the other phrases, which must still fit beside this one.
    """
    n = len(phrase)
    if n > len(free):
        return None
    spans = positions.unfold(0, n, 1)
    fits = free.unfold(0, n, 1).all(-1) & (spans[:, -1] - spans[:, 0] == n - 1)
    score = log_p[:, phrase].unfold(0, n, 1).diagonal(dim1=1, dim2=2).sum(-1)
    known: dict[tuple[int, ...], bool] = {}
    for at in torch.where(fits, score, -torch.inf).argsort(descending=True, stable=True)[: int(fits.sum())].tolist():
        if not others:
            return int(at)
        rest = free.clone()
        rest[at : at + n] = False
        runs = tuple(sorted(_runs((p, 0) for p in positions[rest].tolist())))
        if runs not in known:
            known[runs] = packs([*runs, *later], others)
        if known[runs]:
            return int(at)
    return None


def _runs(places: Iterable[tuple[int, int]]) -> list[int]:
    """Lengths of the runs of neighbouring positions; ``places`` are (position, block), ascending."""
    out: list[int] = []
    before = (-2, -1)
    for here in places:
        if here == (before[0] + 1, before[1]):
            out[-1] += 1
        else:
            out.append(1)
        before = here
    return out


def place_words(s: RowState, index: Tensor, view: View, spec: DLMSpec) -> Tensor:
    """Place waiting phrases into the open blocks; placed tokens are fixed.

    A phrase is only placed where the others still fit, so that none is left when the row ends.

    Args:
        s: all rows, changed in place.
        index: ``Long[a]`` rows of the view.
        view: their columns after a pass: all that are open in the block.
        spec: the model.

    Returns:
        ``Bool[a]`` rows in which something was placed.
    """
    placed = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    log_p = torch.log_softmax(view.logits, -1)
    for i, row in enumerate(index.tolist()):
        free = view.open[i] & (view.positions[i] < int(s.limit[row]))
        later = free_runs(s, spec, row, int(s.end[row]))
        waiting = sorted(s.words[row], key=len, reverse=True)
        left: list[Tensor] = []
        for number, phrase in enumerate(waiting):
            others = [len(p) for p in (*left, *waiting[number + 1 :])]
            at = best_place(log_p[i], free, view.positions[i], phrase, later, others)
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


def missing_words(texts: Sequence[Tensor], phrases: Sequence[Tensor]) -> list[int]:
    """Rows whose text lacks a phrase."""
    return [r for r, text in enumerate(texts) if not all(_holds(text.tolist(), p.tolist()) for p in phrases)]


def _holds(text: list[int], phrase: list[int]) -> bool:
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text) - len(phrase) + 1))
