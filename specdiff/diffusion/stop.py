"""When a row has ended: end tokens, stop strings, length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdiff.diffusion.state import RowState
from specdiff.errors import InvalidInputError


@dataclass
class Ending:
    """Tests of the rows of one call.

    Attributes:
        eos: ``Long[n]`` ids that end a row, or None.
        strings: stop strings.
        tokenizer: needed for stop strings.
    """

    eos: Tensor | None = None
    strings: tuple[str, ...] = ()
    tokenizer: Any = None
    _seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.strings and self.tokenizer is None:
            raise InvalidInputError("stop_strings needs a tokenizer: DiffusionLM(model, ..., tokenizer=tok)")
        if any(not s for s in self.strings):
            raise InvalidInputError("an empty stop string would stop everything")

    def test(self, s: RowState, sticky: bool) -> tuple[list[str | None], list[int]]:
        """Which rows have ended.

        Args:
            s: rows at work.
            sticky: committed tokens stay, so that a row may end inside its open block; otherwise only closed blocks
                count.

        Returns:
            per row the reason ("eos", "stop", "length") or None, and one past the last position to return.
        """
        c = s.canvas
        after = c.positions >= s.first[:, None]
        edge = s.limit if sticky else torch.where(s.opened, torch.minimum(s.start, s.limit), s.limit)
        clean = (~c.noisy | ~after).long().cumprod(-1).bool()
        settled = clean & after & (c.positions < edge[:, None])
        ready = settled.sum(-1)
        length = s.limit - s.first
        hit = settled & torch.isin(c.ids, self.eos) if self.eos is not None else torch.zeros_like(settled)
        place = torch.where(hit, c.positions, c.ids.shape[1]).amin(-1)
        reasons: list[str | None] = []
        stops: list[int] = []
        for i, (count, need, eos, first) in enumerate(
            zip(ready.tolist(), length.tolist(), place.tolist(), s.first.tolist(), strict=True)
        ):
            reason: str | None = "length" if count >= need else None
            stop = first + need
            if eos < c.ids.shape[1]:
                reason, stop = "eos", eos + 1
                count = min(count, stop - first)
            cut = self._string(int(s.row[i]), c.ids[i, first : first + count].tolist())
            if (cut is not None and first + cut < stop) or (cut is not None and reason != "eos"):
                reason, stop = "stop", first + (cut or 0)
            reasons.append(reason)
            stops.append(stop)
        return reasons, stops

    def _string(self, row: int, tokens: list[int]) -> int | None:
        """Number of tokens up to the one that completes a stop string."""
        if not self.strings or self._seen.get(row) == len(tokens):
            return None
        self._seen[row] = len(tokens)
        if not any(s in self.tokenizer.decode(tokens) for s in self.strings):
            return None
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if any(s in self.tokenizer.decode(tokens[:middle]) for s in self.strings):
                high = middle
            else:
                low = middle + 1
        return low
