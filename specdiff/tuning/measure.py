"""Measuring a :class:`~specdiff.tuning.curve.CostCurve`: passes of target and drafter on random ids."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession
from specdiff.target import Target, TargetState
from specdiff.tuning.curve import CostCurve
from specdiff.verify import Noise, Proposal, row_seeds, verify
from specdiff.verify.laws import Sampled
from specdiff.verify.noise import RoundNoise
from specdiff.warp import BlockWarp

if TYPE_CHECKING:
    from specdiff.wrap import SpecDiff

INPUTS = (1, 2, 4, 8, 16, 24)
REPEATS = 9
BUDGET = 3.0
"""Seconds after which no more than ``REPEATS`` are made; quick passes are repeated up to ten times as often."""
WARM_TOKENS = 16
"""Tokens committed one by one, without a draft between, to learn what keeping a drafter's context costs."""


@dataclass(frozen=True)
class Judge:
    """What follows a target pass in a round: logits processors, the acceptance rule, the read-back.

    Attributes:
        rule: the acceptance rule.
        warp: the logits processors; those that look at ids or remember calls are left out of the measurement.
    """

    rule: str
    warp: BlockWarp

    def __call__(self, logits: Tensor, proposal: Proposal, noise: RoundNoise) -> None:
        """Judge ``logits``: ``[B, K + 1, V]`` as the loop does."""
        scores = logits if self.warp.needs_ids else self.warp.block([], logits, proposal.tokens)
        verify(self.rule, scores, proposal, noise).next_token.tolist()


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_cost(
    wrapped: SpecDiff,
    target: Target | None = None,
    *,
    inputs: Sequence[int] = INPUTS,
    context: int = 192,
    batch_size: int = 1,
    block: int | None = None,
    repeats: int = REPEATS,
    budget: float = BUDGET,
    limit: float = math.inf,
    seed: int = 0,
    judge: Judge | None = None,
) -> CostCurve:
    """Measure passes of target and drafter on random ids, sizes interleaved, medians over ``repeats``.

    Args:
        wrapped: the pair.
        target: the target path to measure; the one that plain requests take when None.
        inputs: numbers of inputs per row.
        context: committed tokens before each pass.
        batch_size: rows.
        block: largest proposal; that of ``wrapped`` when None.
        repeats: least measurements per size, one more is thrown away; quick passes get up to ten times as many.
        budget: seconds that quick passes may take beyond that, per curve.
        limit: seconds after which even ``repeats`` are not completed, per curve (one measurement always is).
        seed: of the random ids.
        judge: what the loop does after a pass; measured with the pass when given.
    """
    block = wrapped.block_size if block is None else block
    if target is None:
        target, _ = wrapped.target_for(context + max(*inputs, block) + 2)
    bench = Passes(target, wrapped.drafter, block, inputs, context, batch_size, seed, judge)
    with torch.no_grad():
        try:
            prefill = bench.open()
            curve = _medians(bench.target_pass, bench.wanted, repeats, budget, limit, target.device)
            if wrapped.drafter is None:
                return CostCurve(bench.context, batch_size, target.name, curve, {}, 0, prefill=prefill)
            sizes = sorted({n for n in inputs if n <= block} | {block})
            drafts = _medians(bench.draft, sizes, repeats, budget, limit, target.device)
            behind = _medians(bench.draft_behind, sizes[:1], repeats, budget, limit, target.device)[sizes[0]]
            return CostCurve(
                bench.context, batch_size, target.name, curve, drafts, block,
                warm=max(0.0, behind - drafts[sizes[0]]) / WARM_TOKENS, prefill=prefill,
            )  # fmt: skip
        finally:
            bench.close()


class Passes:
    """The passes that are timed. Nothing they do is kept: each starts from the same committed context."""

    def __init__(
        self, target: Target, drafter: Drafter | None, block: int, inputs: Sequence[int], context: int, batch: int,
        seed: int, judge: Judge | None,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.batch, self.judge = target, drafter, batch, judge
        self.wanted = sorted({1, *inputs} | ({block + 1} if block else set()))
        room = max(*self.wanted, WARM_TOKENS) + 2
        if target.max_positions is not None:
            context = max(1, min(context, target.max_positions - room))
        refuses = getattr(target, "refuses", lambda capacity: None)
        while context > 1 and refuses(context + room) is not None:
            context //= 2  # a window that is shorter than the usual context
        self.context, self.capacity = context, context + room
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(target.vocab_size, (batch, self.capacity), generator=generator)
        self.ids = ids.to(target.device)
        self.counts = torch.full((batch,), context, device=target.device)
        self.noise = Noise(row_seeds(seed, batch, target.device)).round(self.counts + 1)
        self.state: TargetState | None = None
        self.session: DraftSession | None = None
        self.logits: Tensor | None = None

    def open(self) -> float:
        """Fill both caches; returns the seconds that a prompt token takes."""
        drafter, ids, counts = self.drafter, self.ids[:, : self.context], self.counts
        self.state = state = self.target.open(
            self.batch, self.capacity, tuple(drafter.taps) if drafter is not None else ()
        )
        state.forward(ids, counts, head="last")
        synchronise(self.target.device)
        began = time.perf_counter()
        taps = state.forward(ids, counts, head="last").taps
        synchronise(self.target.device)
        prefill = (time.perf_counter() - began) / self.context
        state.advance([self.context] * self.batch)
        if drafter is not None:
            rule, warp = (self.judge.rule, self.judge.warp.draft_warp()) if self.judge else ("greedy", lambda x: x)
            request = DraftRequest(
                batch_size=self.batch,
                device=self.target.device,
                dtype=self.target.dtype,
                vocab_size=self.target.vocab_size,
                capacity=self.capacity,
                target_cache=state,
                rule=rule,
                warp=warp,
                prompt_lengths=counts,
            )
            self.session = drafter.start(request)
            self.session.commit(ids, counts, taps)
        first = state.forward(self.ids[:, self.context : self.context + 2], torch.full_like(counts, 2))
        self.fresh = first.taps
        assert first.logits is not None
        self.row = first.logits[:, :1]
        return prefill

    def target_pass(self, size: int) -> None:
        """A pass over ``size`` inputs, and its judgement with a judge."""
        assert self.state is not None
        counts = torch.full((self.batch,), size, device=self.ids.device)
        logits = self.state.forward(self.ids[:, self.context : self.context + size], counts).logits
        if self.judge is not None:
            assert logits is not None
            tokens = self.ids[:, self.context + 1 : self.context + size]
            self.judge(logits, Proposal(tokens, counts - 1), self.noise)

    def draft(self, size: int) -> None:
        """A proposal of ``size`` and the commit of two tokens; the law it brings is judged too, with a judge."""
        assert self.session is not None
        proposal = self.session.propose(self.ids[:, self.context], torch.full_like(self.counts, size), self.noise)
        if self.judge is not None and self.judge.rule in ("token", "block") and proposal.law == Sampled():
            self.judge(self.row.expand(-1, proposal.block + 1, -1), proposal, self.noise)
        self._commit(2)
        self.session.rollback(self.counts)

    def draft_behind(self, size: int) -> None:
        """:meth:`draft` after rounds without a draft."""
        assert self.session is not None
        for _ in range(WARM_TOKENS):
            self._commit(1)
        self.draft(size)

    def _commit(self, count: int) -> None:
        assert self.session is not None
        taps = None if self.fresh is None else self.fresh[:, :count]
        tokens = self.ids[:, self.context : self.context + count]
        self.session.commit(tokens, torch.full_like(self.counts, count), taps)

    def close(self) -> None:
        """Release both sides."""
        for held in (self.session, self.state):
            if held is not None:
                held.close()


def _medians(
    call: Callable[[int], None],
    sizes: Sequence[int],
    repeats: int,
    budget: float,
    limit: float,
    device: torch.device,
) -> dict[int, float]:
    """Median seconds of ``call(size)``; each size twice in a row, the second one timed.

    Where two such turns would take longer than ``limit``, every size is timed once, after one call to warm up.
    """

    def timed(size: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        call(size)
        synchronise(device)
        return time.perf_counter() - began

    times: dict[int, list[float]] = {size: [] for size in sizes}
    start = time.perf_counter()
    if 4 * len(sizes) * timed(sizes[0]) > limit:
        return {size: timed(size) for size in sizes}
    for turn in range(10 * repeats + 1):
        spent = time.perf_counter() - start
        if (turn > repeats and spent >= budget) or (turn > 1 and spent >= limit):
            break
        for size in sizes:
            call(size)  # the same shape just before: caches hold what a running loop would find
            seconds = timed(size)
            if turn:
                times[size].append(seconds)
    return {size: statistics.median(values) for size, values in times.items()}
