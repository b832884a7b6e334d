"""The cache audit: a state driven at random, compared after every commit with the stock model's uncached pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from specdiff.cache.manager import TargetCache
from specdiff.cache.ragged import RaggedLayer, WindowLayer
from specdiff.cache.recurrent import StateLayer
from specdiff.cache.states import GroupedState, OwnLayers, RaggedState
from specdiff.compat.tiny import FIRST_ORDINARY_ID, VOCABULARY
from specdiff.target import Target

TOLERANCE = 1e-4


class Audit:
    """One state, the texts that its rows stand for, and the comparisons.

    Args:
        model: a tiny float32 model.
        batch: rows.
        seed: of the texts.
        capacity: columns that the state may need.
    """

    def __init__(self, model: PreTrainedModel, batch: int, seed: int, capacity: int = 96) -> None:
        self.target = Target(model)
        self.state = self.target.open(batch, capacity)
        self.generator = torch.Generator().manual_seed(seed)
        self.texts = [self._tokens(capacity) for _ in range(batch)]
        self.checked = 0

    def _tokens(self, count: int) -> Tensor:
        return torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (count,), generator=self.generator)

    def step(self, true: Sequence[int], junk: Sequence[int]) -> None:
        """One pass in which row r gets ``true[r]`` right tokens, then ``junk[r]`` others, and keeps the right ones."""
        starts = list(self.state.lengths)
        width = max(t + j for t, j in zip(true, junk, strict=True))
        tokens = torch.zeros(len(self.texts), width, dtype=torch.long)
        for row, (t, j) in enumerate(zip(true, junk, strict=True)):
            tokens[row, :t] = self.texts[row][starts[row] : starts[row] + t]
            tokens[row, t : t + j] = self._tokens(j)
        counts = torch.tensor([t + j for t, j in zip(true, junk, strict=True)])
        result = self.state.forward(tokens, counts)
        assert result.logits is not None
        for row, t in enumerate(true):
            if t:
                text = self.texts[row][: starts[row] + t]
                wanted = self.target.call.uncached(text[None])[0][0, starts[row] :].float()
                gap = (result.logits[row, :t] - wanted).abs().max()
                assert gap < TOLERANCE * max(1.0, float(wanted.std())), f"row {row} at {starts[row]}: {gap}"
        self.state.advance(true)
        assert self.state.lengths == [start + t for start, t in zip(starts, true, strict=True)]
        self.check_contents()

    def select(self, rows: Sequence[int]) -> None:
        """Keep rows."""
        self.state.select(rows)
        self.texts = [self.texts[row] for row in rows]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Shorten rows; their texts go on differently from there."""
        before = list(self.state.lengths)
        self.state.rollback(lengths)
        for row, (old, asked, kept) in enumerate(zip(before, lengths, self.state.lengths, strict=True)):
            assert kept == min(old, asked) or kept == 0
            self.texts[row] = torch.cat([self.texts[row][:kept], self._tokens(len(self.texts[row]) - kept)])
        self.check_contents()

    def check_contents(self) -> None:
        """Keys, values and recurrent states equal those of the stock cache after a fresh pass over the same tokens."""
        cache = own_cache(self.state)
        if cache is None:
            return
        done = self.state.cached if isinstance(self.state, GroupedState) else self.state.lengths
        for row, length in enumerate(done):
            if length:
                stock = DynamicCache(config=self.target.model.config)
                ids = self.texts[row][None, :length]
                self.target.call(ids, positions=torch.arange(length)[None], cache=stock)
                for ours, theirs in zip(cache.layers, stock.layers, strict=True):
                    self._compare(ours, theirs, row, length)

    def _compare(self, ours: object, theirs: object, row: int, length: int) -> None:
        if isinstance(ours, RaggedLayer) and ours.is_initialized:
            base = ours.window.base[row] if isinstance(ours, WindowLayer) else 0
            for name in ("keys", "values"):
                wanted = getattr(theirs, name)[0]
                held = getattr(ours, name)[row, :, : length - base][:, -wanted.shape[1] :]
                kept = min(held.shape[1], wanted.shape[1])
                if isinstance(ours, WindowLayer):
                    assert kept >= min(length, ours.window.window - 1)
                else:
                    assert kept == length
                self._close(held[:, held.shape[1] - kept :], wanted[:, wanted.shape[1] - kept :])
        if isinstance(ours, StateLayer):
            for (kind, index), held in ours.committed.items():
                self._close(held[row], getattr(theirs, kind)[index][0])

    def _close(self, held: Tensor, wanted: Tensor) -> None:
        assert held.shape == wanted.shape
        if wanted.numel():
            gap = float((held - wanted).abs().max())
            assert gap < TOLERANCE * max(1.0, float(wanted.abs().max())), gap
            self.checked += 1


def own_cache(state: RaggedState | GroupedState) -> TargetCache | None:
    """The project's own cache layers behind a state, if it is served with them."""
    if isinstance(state, RaggedState):
        return state.cache
    return state.backend.cache if isinstance(state.backend, OwnLayers) else None
