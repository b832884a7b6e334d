"""The target's side of one request, for every way in which a model can be served."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specdiff.cache.kinds import LayerPlan
from specdiff.cache.manager import TargetCache
from specdiff.cache.passes import Keep, ModelCall
from specdiff.fast.uploads import upload

REPLAY = 16
"""Accepted inputs that may wait to run again in front of a later pass before they get a pass of their own."""
FIRST_CAPACITY = 1024
"""Columns reserved at first; longer requests grow their buffers by doubling."""


@dataclass
class Pass:
    """What one target pass gives.

    Attributes:
        logits: ``float32[B, T, V]`` (``head="all"``), ``[B, 1, V]`` of each row's last valid input (``"last"``), or
            None.
        taps: ``[B, T, n*H]`` states after the tapped layers, in tap order, or None.
    """

    logits: Tensor | None
    taps: Tensor | None


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    Attributes:
        mode: ``ragged`` (all rows in one pass, own cache layers, explicit masks), ``rows`` (one row per pass, own cache
            layers, the model makes its masks), ``foreign`` (one row per pass, the model's own cache object, copied
            before each pass), ``uncached`` (one row per pass, everything computed again).
        by_type: masks go in as a dict by layer type instead of one tensor.
        padding_mask: in the modes of one row per pass, a 2-D mask of ones goes in, as ``generate`` does it.
        own_cache: in mode ``foreign``, the model makes its cache in the first pass, instead of getting transformers'
            default.
        stepwise: after the first pass of a row, one token per pass, for models whose multi-token step is wrong.
        plans: the cache layers, for the modes with own layers.
    """

    mode: Literal["ragged", "rows", "foreign", "uncached"]
    by_type: bool = False
    padding_mask: bool = True
    own_cache: bool = False
    stepwise: bool = False
    plans: tuple[LayerPlan, ...] = ()

    @property
    def words(self) -> str:
        """In a few words."""
        words: list[str] = [self.mode]
        if self.mode == "ragged":
            words.append("with masks by layer type" if self.by_type else "with one mask")
        elif not self.padding_mask:
            words.append("without a mask")
        if self.own_cache:
            words.append("of the model's making")
        if self.stepwise:
            words.append("token by token")
        return " ".join(words)

    @property
    def note(self) -> str | None:
        """What a user should know about it, or None."""
        if self.mode == "uncached":
            return "this target is decoded without a cache, every pass computes the whole text again"
        if self.stepwise:
            return (
                "this target's multi-token step with a filled state is wrong in transformers, so drafts are verified "
                "token by token: right, but without speed-up"
            )
        if self.mode == "foreign":
            return "this target's own cache object is copied before each pass, and rows run one at a time"
        if self.mode == "rows":
            return "this target takes no per-row masks and positions, so rows run one at a time"
        return None


class RaggedState:
    """Attention-only targets: all rows in one padded pass, which nothing has to wait for."""

    def __init__(
        self, call: ModelCall, serving: Serving, batch: int, capacity: int, taps: tuple[int, ...], top: int | None
    ):
        self.call, self.serving, self.taps, self.top = call, serving, taps, top
        self.lengths = [0] * batch
        self.cache = TargetCache(serving.plans, batch, min(capacity, FIRST_CAPACITY), capacity)

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """See :class:`specdiff.target.TargetState`."""
        device = self.call.device
        self.cache.begin(upload(self.lengths, device), self.lengths, tokens.shape[1])
        last = (counts - 1).clamp(min=0)
        kept = torch.unique(last) if head == "last" else None
        logits, tapped = self._run(tokens, counts, kept if head == "last" else 1 if head is None else None)
        if head is None:
            return Pass(None, tapped)
        if kept is not None:
            index = torch.searchsorted(kept, last).to(logits.device)
            logits = logits[torch.arange(len(self.lengths), device=logits.device), index][:, None]
        return Pass(logits.to(device=device, dtype=torch.float32), tapped)

    def _run(self, tokens: Tensor, counts: Tensor, keep: Keep | None) -> tuple[Tensor, Tensor | None]:
        """The pass that the cache's span describes: logits of the inputs in ``keep``, and tapped states."""
        positions = self.cache.span.positions()
        if self.top is not None:
            # Only padding of a ragged pass can lie past the last position while the row itself does not.
            inside = torch.arange(tokens.shape[1], device=positions.device) < counts[:, None]
            positions = torch.where(inside, positions, positions.clamp(max=self.top - 1))
        mask = self.cache.masks(self.call.model.dtype, by_type=self.serving.by_type)
        logits, tapped, _ = self.call(
            tokens, positions=positions, mask=mask, cache=self.cache, keep=keep, taps=self.taps
        )
        return logits, tapped

    def advance(self, counts: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.cache.select(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def rollback(self, lengths: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        for row, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            self.lengths[row] = self.cache.kept(row, old, new)
            if not self.lengths[row]:
                self.cache.restart(row)

    def close(self) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.cache = TargetCache((), 0, 0, 0)


class GroupedState:
    """Everything else: rows run in groups of equal numbers of inputs, so that padding never enters a state.

    Inputs that were accepted in a pass whose later inputs were not are *pending*: for a recurrent state they run again
    in front of the row's next pass (or in one of their own, when more than ``REPLAY`` wait).
    """

    def __init__(
        self, call: ModelCall, serving: Serving, batch: int, capacity: int, taps: tuple[int, ...], top: int | None
    ):
        self.call, self.serving, self.taps, self.top = call, serving, taps, top
        self.lengths = [0] * batch
        self.cached = [0] * batch
        self.pending: list[Tensor] = [torch.zeros(0, dtype=torch.long, device=call.device) for _ in range(batch)]
        self.ran: dict[int, Tensor] = {}
        self.backend: OwnLayers | ForeignCaches
        if serving.mode in ("ragged", "rows"):
            self.backend = OwnLayers(call, serving, batch, capacity, taps)
        else:
            self.backend = ForeignCaches(call, serving, batch, taps)

    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> Pass:
        """See :class:`specdiff.target.TargetState`."""
        device = self.call.device
        tokens = tokens.to(device)
        fresh = counts.tolist()
        self._replay([row for row, count in enumerate(fresh) if count])
        self.backend.forget()
        self.ran = {
            row: torch.cat([self.pending[row], tokens[row, :count]]) for row, count in enumerate(fresh) if count
        }
        logits: Tensor | None = None
        taps: Tensor | None = None
        for rows in self._groups({row: len(inputs) for row, inputs in self.ran.items()}):
            most = max(fresh[row] for row in rows)
            keep = most if head == "all" else 1
            got, states = self.backend.run(rows, [self.cached[row] for row in rows], self._stack(rows), keep)
            width = len(self.ran[rows[0]])
            if logits is None and head is not None:
                shape = (len(fresh), tokens.shape[1] if head == "all" else 1, got.shape[-1])
                logits = torch.zeros(shape, dtype=torch.float32, device=device)
            if taps is None and states is not None:
                taps = torch.zeros(*tokens.shape, states.shape[-1], dtype=states.dtype, device=device)
            for at, row in enumerate(rows):
                count = fresh[row]
                if logits is not None:
                    rows_out = count if head == "all" else 1
                    logits[row, :rows_out] = got[at, got.shape[1] - rows_out :].to(device)
                if taps is not None and states is not None:
                    taps[row, :count] = states[at, width - count :]
        return Pass(logits, taps)

    def _stack(self, rows: Sequence[int]) -> Tensor:
        return torch.stack([self.ran[row] for row in rows])

    def _groups(self, widths: dict[int, int]) -> list[list[int]]:
        """Rows with equal numbers of inputs run together; rows that begin apart from those that go on."""
        if self.serving.mode != "ragged":
            return [[row] for row in widths]
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, width in widths.items():
            groups.setdefault((width, self.cached[row] == 0), []).append(row)
        return list(groups.values())

    def _replay(self, rows: Sequence[int]) -> None:
        """Give inputs that wait in too great a number a pass of their own."""
        many = [row for row in rows if len(self.pending[row]) > REPLAY]
        if not many:
            return
        self.backend.forget()
        self.ran = {row: self.pending[row] for row in many}
        for group in self._groups({row: len(inputs) for row, inputs in self.ran.items()}):
            self.backend.run(group, [self.cached[row] for row in group], self._stack(group), 1)
        for row in many:
            self._commit(row, len(self.ran[row]))

    def _commit(self, row: int, inputs: int) -> None:
        """Take the state after ``inputs`` inputs of the last pass over, or let them wait."""
        if self.backend.take_over(row, inputs):
            self.cached[row] += inputs
            self.pending[row] = self.pending[row][:0]
        else:
            self.pending[row] = self.ran[row][:inputs]

    def advance(self, counts: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        for row, count in enumerate(counts):
            if count:
                self._commit(row, len(self.pending[row]) + count)
                self.lengths[row] += count
        self.backend.forget()

    def select(self, rows: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.backend.select(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.cached = [self.cached[row] for row in rows]
        self.pending = [self.pending[row] for row in rows]
        self.ran = {}

    def rollback(self, lengths: Sequence[int]) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.backend.forget()
        for row, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if new >= old:
                continue
            if new >= self.cached[row]:
                self.pending[row] = self.pending[row][: new - self.cached[row]]
                self.lengths[row] = new
                continue
            self.cached[row] = self.lengths[row] = self.backend.rollback(row, self.cached[row], new)
            self.pending[row] = self.pending[row][:0]

    def close(self) -> None:
        """See :class:`specdiff.target.TargetState`."""
        self.backend.select(())
        self.ran, self.pending = {}, []


class OwnLayers:
    """Passes over the project's own cache layers."""

    def __init__(self, call: ModelCall, serving: Serving, batch: int, capacity: int, taps: tuple[int, ...]) -> None:
        self.call, self.serving, self.taps = call, serving, taps
        self.cache = TargetCache(serving.plans, batch, min(capacity, FIRST_CAPACITY), capacity)

    def run(self, rows: list[int], starts: list[int], ids: Tensor, keep: int) -> tuple[Tensor, Tensor | None]:
        """Run ``ids``: ``Long[g, n]`` of ``rows`` behind their ``starts`` cached tokens."""
        steps = [ids] if not self.serving.stepwise or max(starts) == 0 else list(ids.split(1, dim=1))
        logits, taps, done = [], [], 0
        for step in steps:
            width = step.shape[1]
            begin = [start + done for start in starts]
            self.cache.begin(upload(begin, ids.device), begin, width, rows, go_on=done > 0)
            mask: Any = None
            if self.serving.mode == "ragged":
                mask = self.cache.masks(self.call.model.dtype, by_type=self.serving.by_type)
            elif self.serving.padding_mask:
                mask = torch.ones(len(rows), max(begin) + width, dtype=torch.long, device=ids.device)
            positions = self.cache.span.positions()
            got, states, _ = self.call(
                step, positions=positions, mask=mask, cache=self.cache, keep=min(keep, width), taps=self.taps
            )
            done += width
            self.cache.end(done, more=done < ids.shape[1])
            logits.append(got)
            taps.append(states)
        return torch.cat(logits, dim=1)[:, -keep:].float(), _joined(taps)

    def take_over(self, row: int, inputs: int) -> bool:
        """Whether the state after ``inputs`` inputs exists; it is committed then. Attention keeps every one."""
        return not self.cache.recurrent or self.cache.take_over(row, inputs)

    def forget(self) -> None:
        """Drop what was put aside."""
        self.cache.forget()

    def rollback(self, row: int, old: int, new: int) -> int:
        """Shorten ``row`` to ``new`` of its ``old`` cached tokens, or to none when the state cannot go back."""
        kept = self.cache.kept(row, old, new)
        if not kept:
            self.cache.restart(row)
        return kept

    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows."""
        self.cache.select(rows)


class ForeignCaches:
    """Passes over the model's own cache objects, one per row, or over none at all (``uncached``).

    A copy is made before each pass, and the pass works on the copy: what is rejected leaves no trace.
    """

    def __init__(self, call: ModelCall, serving: Serving, batch: int, taps: tuple[int, ...]) -> None:
        self.call, self.serving, self.taps = call, serving, taps
        self.held: list[Any] = [None] * batch
        self.results: dict[tuple[int, int], Any] = {}

    def run(self, rows: list[int], starts: list[int], ids: Tensor, keep: int) -> tuple[Tensor, Tensor | None]:
        """Run ``ids``: ``Long[1, n]`` of the one row behind its cached tokens."""
        (row,), (start,) = rows, starts
        if self.serving.mode == "uncached":
            return self._whole(row, start, ids, keep)
        cache = copy.deepcopy(self.held[row]) if start else self._new()
        steps = [ids] if not self.serving.stepwise or start == 0 else list(ids.split(1, dim=1))
        logits, taps, done = [], [], 0
        for step in steps:
            width = step.shape[1]
            at = start + done
            positions = torch.arange(at, at + width, device=ids.device)[None]
            ones = torch.ones(1, at + width, dtype=torch.long, device=ids.device)
            mask = ones if self.serving.padding_mask else None
            got, states, returned = self.call(
                step, positions=positions, mask=mask, cache=cache, keep=min(keep, width), taps=self.taps
            )
            cache = cache if returned is None else returned
            done += width
            self.results[row, done] = cache if done == ids.shape[1] else copy.deepcopy(cache)
            logits.append(got)
            taps.append(states)
        return torch.cat(logits, dim=1)[:, -keep:].float(), _joined(taps)

    def _whole(self, row: int, start: int, ids: Tensor, keep: int) -> tuple[Tensor, Tensor | None]:
        text = ids if not start else torch.cat([self.held[row], ids], dim=1)
        got, states = self.call.uncached(text, keep=keep, taps=self.taps)
        for inputs in range(1, ids.shape[1] + 1):
            self.results[row, inputs] = text[:, : start + inputs]
        return got[:, -keep:].float(), None if states is None else states[:, start:]

    def _new(self) -> Any:
        return None if self.serving.own_cache else DynamicCache(config=self.call.model.config)

    def take_over(self, row: int, inputs: int) -> bool:
        """Take the cache after ``inputs`` inputs over, if there is one."""
        if (row, inputs) not in self.results:
            return False
        self.held[row] = self.results[row, inputs]
        return True

    def forget(self) -> None:
        """Drop what was put aside."""
        self.results = {}

    def rollback(self, row: int, old: int, new: int) -> int:
        """Whole texts can be cut; a foreign cache begins again."""
        if self.serving.mode == "uncached" and new:
            self.held[row] = self.held[row][:, :new]
            return new
        self.held[row] = None
        return 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows."""
        self.results = {}
        self.held = [self.held[row] for row in rows]


def _joined(taps: list[Tensor | None]) -> Tensor | None:
    parts = [part for part in taps if part is not None]
    return torch.cat(parts, dim=1) if parts else None
