"""Continuous batched generation with the target's own states: B lanes, a finished one is refilled at once.

Rows are right-aligned in time, not in space: each row owns one lane of a ragged cache. What two prompts have in common
at their start (a system prompt, the same quoted passages) is computed once where one follows the other in a lane. The
states and likeliest tokens that training will ask for pass by anyway, so they are kept on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.common_start import common_start
from specdiff.drafters.train.features import FLOAT16_MAX


class Trace(NamedTuple):
    """What the target said while it wrote one text of T tokens. The last token was never fed: its row is zero.

    Attributes:
        taps: ``float16[T, n * H]`` state after each tapped layer.
        top_ids: ``int32[T, k]`` likeliest next tokens; zeros inside the prompt, where nothing asked for them.
        top_logprobs: ``float16[T, k]`` their log-probabilities; very negative inside the prompt.
    """

    taps: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Answer(NamedTuple):
    """One finished text: number of its prompt, new ids (the end token included), and its trace if one was kept."""

    prompt: int
    ids: list[int]
    trace: Trace | None = None


Generate = Callable[[list[list[int]], list[float], int, int], Iterable[Answer]]
"""``(prompts, temperatures, max_new_tokens, seed) -> answers`` in any order: how text is made."""

SHRINK = 0.8
"""The batch is made smaller when at most this share of its lanes is busy."""
NEVER = -60000.0
"""Log-probability in float16 of a token that cannot come."""


@dataclass
class Lane:
    """One row of the batch.

    Attributes:
        owner: index of the prompt that it works on, None when idle.
        fed: ids whose states the cache holds.
        feed: ids to be fed next.
        new: ids written for the owner.
        states: ``float16[count, n * H]`` taps of ``fed``, pass by pass.
        laws: ids and log-probabilities of the likeliest next tokens, one pair for each of ``new``.
    """

    owner: int | None = None
    fed: list[int] = field(default_factory=list)
    feed: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    laws: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def keep(self, length: int) -> None:
        """Forget all but the first ``length`` fed ids and their states."""
        self.fed = self.fed[:length]
        self.states = [np.concatenate(self.states)[:length]] if self.states and length else []

    def trace(self, prompt: int, top: int) -> Trace:
        """The finished text's trace; the last of ``new`` was not fed."""
        states = np.concatenate(self.states)
        length = prompt + len(self.new)
        taps = np.zeros((length, states.shape[1]), np.float16)
        taps[: len(states)] = states[:length]
        ids = np.zeros((length, top), np.int32)
        logprobs = np.full((length, top), NEVER, np.float16)
        for at, (best, law) in enumerate(self.laws, prompt - 1):
            ids[at], logprobs[at] = best, law
        return Trace(taps, ids, logprobs)


class Generator:
    """Text by continuous batching.

    Args:
        open_state: ``(batch, capacity, taps) -> state`` with ``forward(tokens, counts, head=)``, ``advance``,
            ``rollback``, ``select`` as the engine's target states have them; passed in, since drafters never import the
            engine.
        ends: ids that end a text.
        device: of the target.
        lanes: B.
        top_k: samples come from the k largest logits.
        taps: layers whose states traces hold; () to keep no traces.
        top: likeliest tokens per position that traces hold.
    """

    def __init__(
        self,
        open_state: Callable[[int, int, Sequence[int]], Any],
        ends: Iterable[int],
        device: torch.device,
        lanes: int = 64,
        top_k: int = 128,
        taps: Sequence[int] = (),
        top: int = 32,
    ) -> None:
        self.open_state, self.ends, self.device = open_state, frozenset(ends), device
        self.lanes, self.top_k = lanes, top_k
        self.taps, self.top = tuple(taps), top

    @torch.no_grad()
    def __call__(
        self, prompts: list[list[int]], temperatures: list[float], max_new_tokens: int, seed: int
    ) -> Iterator[Answer]:
        """Answers as they are finished."""
        if not prompts:
            return
        random_state = torch.Generator(device="cpu").manual_seed(seed)
        lanes = [Lane() for _ in range(min(self.lanes, len(prompts)))]
        state = self.open_state(len(lanes), max(map(len, prompts)) + max_new_tokens + 1, self.taps)
        # long prompts first: lanes of like lengths, since a pass may attend over the longest row for all of them
        queue = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        for lane in lanes:
            refill(lane, prompts, queue)
            lane.feed = list(prompts[lane.owner]) if lane.owner is not None else []
        try:
            while any(lane.owner is not None for lane in lanes):
                width = pass_width([len(lane.feed) for lane in lanes])
                now = [lane.feed[:width] for lane in lanes]
                counts = [len(n) for n in now]
                table = torch.tensor([n + [0] * (width - len(n)) for n in now], device=self.device)
                result = state.forward(table, torch.tensor(counts, device=self.device), head="last")
                state.advance(counts)
                logits = result.logits[:, 0].float().cpu()
                warmth = torch.tensor([0.0 if r.owner is None else temperatures[r.owner] for r in lanes])
                drawn = draw(logits, warmth, self.top_k, random_state).tolist()
                self._remember(lanes, now, logits, result.taps)
                lengths = list(state.lengths)
                freed: list[int] = []
                for row, lane in enumerate(lanes):
                    lane.fed += now[row]
                    lane.feed = lane.feed[width:]
                    if lane.owner is None or lane.feed:
                        continue
                    lane.new.append(drawn[row])
                    lane.feed = [drawn[row]]
                    if drawn[row] in self.ends or len(lane.new) >= max_new_tokens:
                        trace = lane.trace(len(prompts[lane.owner]), self.top) if self.taps else None
                        yield Answer(lane.owner, lane.new, trace)
                        lengths[row] = refill(lane, prompts, queue)
                        freed.append(row)
                if freed:
                    state.rollback(lengths)
                for row in freed:  # a state may have kept less than it was asked to
                    lane = lanes[row]
                    lane.keep(state.lengths[row])
                    lane.feed = list(prompts[lane.owner][state.lengths[row] :]) if lane.owner is not None else []
                busy = [row for row, lane in enumerate(lanes) if lane.owner is not None]
                if busy and len(busy) <= SHRINK * len(lanes):  # nothing waits any more: idle rows would cost the same
                    state.select(busy)
                    lanes = [lanes[row] for row in busy]
        finally:
            state.close()

    def _remember(self, lanes: list[Lane], now: list[list[int]], logits: Tensor, taps: Tensor | None) -> None:
        """Book one pass: states of all that was fed, laws where a token is about to be written."""
        if not self.taps:
            return
        assert taps is not None
        values, ids = logits.topk(min(self.top, logits.shape[-1]), -1)
        laws = (values - logits.logsumexp(-1, keepdim=True)).clamp(min=NEVER).half().numpy()
        best = ids.int().numpy()
        states = taps.float().clamp(-FLOAT16_MAX, FLOAT16_MAX).half().cpu().numpy()
        for row, lane in enumerate(lanes):
            if now[row]:
                lane.states.append(states[row, : len(now[row])].copy())
            if lane.owner is not None and len(now[row]) == len(lane.feed):
                lane.laws.append((best[row], laws[row]))


def refill(lane: Lane, prompts: Sequence[Sequence[int]], queue: list[int]) -> int:
    """Give a lane the waiting prompt that shares the longest start with what it holds; returns how many ids to keep.

    At least one id is always left to feed.
    """
    lane.new, lane.laws, lane.feed = [], [], []
    if not queue:
        lane.owner = None
        return 0
    shares = [common_start(lane.fed, prompts[index]) for index in queue]
    best = max(range(len(queue)), key=shares.__getitem__)
    lane.owner = queue.pop(best)
    return min(shares[best], len(prompts[lane.owner]) - 1)


def pass_width(pending: list[int]) -> int:
    """Inputs per lane of the next pass: the most for which at least half of what is computed is needed.

    A lane with a new prompt then does not make the others wait for it, and a batch of new prompts goes in whole.
    """
    for width in sorted(set(pending), reverse=True):
        if width and 2 * sum(min(p, width) for p in pending) >= width * sum(p > 0 for p in pending):
            return width
    return 1


def draw(logits: Tensor, temperatures: Tensor, top_k: int, random_state: torch.Generator) -> Tensor:
    """``Long[B]``: the argmax where a temperature is 0, else a draw from the ``top_k`` largest logits."""
    values, ids = logits.topk(min(top_k, logits.shape[-1]), -1)
    probs = (values / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
    picked = torch.multinomial(probs, 1, generator=random_state)
    picked = torch.where((temperatures > 0)[:, None], picked, torch.zeros_like(picked))
    return ids.gather(1, picked)[:, 0]
