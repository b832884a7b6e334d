"""Streams that show a canvas being refined: transformers' ``TextDiffusionStreamer``, or any plain streamer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specdiff.diffusion.state import RowState


class Streamer(Protocol):
    """What a streamer has; ``put_draft(value)`` is optional."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Stream:
    """Feeds one row to a streamer: confirmed tokens once, drafts of the open block after every pass.

    Args:
        streamer: the receiver. One with a true attribute ``takes_noise`` gets ``put_draft(ids, noisy=...)``.
        sticky: committed tokens stay and are confirmed at once; otherwise only when their block has closed.
    """

    def __init__(self, streamer: Any, sticky: bool) -> None:
        self.streamer = streamer
        self.sticky = sticky
        self.sent = 0

    def __call__(self, s: RowState) -> None:
        """After a pass."""
        if not s.size:
            return
        c = s.canvas
        limit = int(s.limit[0])
        edge = limit if self.sticky or not bool(s.opened[0]) else min(int(s.start[0]), limit)
        first = int(s.first[0])
        clean = (~c.noisy[0, first:edge]).long().cumprod(0).sum()
        # what ends the row is only known after the pass: keep the newest back, finish() hands it over
        begin = first + self.sent
        end = min(int(s.end[0]), limit)
        self._pending = first + int(clean)
        if hasattr(self.streamer, "put_draft") and begin < end:
            draft = c.ids[:1, begin:end].cpu()
            if getattr(self.streamer, "takes_noise", False):
                self.streamer.put_draft(draft, noisy=c.noisy[:1, begin:end].cpu())
            else:
                self.streamer.put_draft(draft)

    def confirm(self, s: RowState, stop: int | None = None) -> None:
        """Hand over tokens that are settled: up to ``stop`` at the end of the row, else what the last pass settled."""
        first = int(s.first[0])
        upto = stop if stop is not None else self._pending
        if upto > first + self.sent:
            self.streamer.put(s.canvas.ids[0, first + self.sent : upto].cpu())
            self.sent = upto - first

    _pending = 0


class Trajectory:
    """Keeps every pass's generated part.

    Args:
        first: ``Long[B]`` first new position.
        width: tokens to generate.
        mask_id: shown before a row's first pass.
    """

    def __init__(self, first: Tensor, width: int, mask_id: int) -> None:
        rows = len(first)
        self._ids = torch.full((rows, width), mask_id, dtype=torch.long)
        self._noisy = torch.ones((rows, width), dtype=torch.bool)
        self.passes: list[tuple[Tensor, Tensor]] = []

    def __call__(self, s: RowState) -> None:
        """After a pass."""
        width = self._ids.shape[1]
        for i, row in enumerate(s.row.tolist()):
            first = int(s.first[i])
            self._ids[row] = s.canvas.ids[i, first : first + width].cpu()
            self._noisy[row] = s.canvas.noisy[i, first : first + width].cpu()
        self.passes.append((self._ids.clone(), self._noisy.clone()))
