"""The decode loop, once: draft a block, verify it in one target pass, commit what stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Outlook
from specdiff.errors import InvalidInputError, NumericalError
from specdiff.fast.uploads import upload
from specdiff.fingerprint import Fingerprint
from specdiff.sequential import verify_in_order
from specdiff.stats import GenerationStats
from specdiff.stopping import StopTests
from specdiff.streaming import Feed
from specdiff.target import Target, TargetState
from specdiff.tuning.lengths import FixedLengths, Lengths
from specdiff.verify import Noise, Proposal, Verdict, verify
from specdiff.verify.noise import RoundNoise
from specdiff.warp import BlockWarp

DEFAULT_CHUNK = 1024
"""Prompt tokens per prefill pass; bounds the mask and the tapped states of one pass."""


@dataclass
class Job:
    """One call, ready to run.

    Attributes:
        ids: ``Long[B, P]`` prompts as plain decoding holds them, left padding included.
        pads: left padding of each row.
        max_new: upper bound of new tokens per row.
        pad_token: what fills rows that ended early.
        rule: acceptance rule.
        block_size: largest block asked of the drafter.
        warp: logits processors.
        stops: stopping criteria.
        seeds: ``Long[B]`` row seeds.
        chunk: prompt tokens per prefill pass.
        lengths: how much of a block each round drafts.
        feed: takes each committed token, for a streamer.
        keep_scores: keep processed scores of each new token.
        keep_logits: keep raw logits of each new token.
        seen: the model's fingerprint at the start of the call, if somebody asks for it.
    """

    ids: Tensor
    pads: list[int]
    max_new: int
    pad_token: int
    rule: str
    block_size: int
    warp: BlockWarp
    stops: StopTests
    seeds: Tensor
    chunk: int = DEFAULT_CHUNK
    lengths: Lengths = field(default_factory=FixedLengths)
    feed: Feed = field(default_factory=lambda: Feed(None))
    keep_scores: bool = False
    keep_logits: bool = False
    stats: GenerationStats = field(default_factory=GenerationStats)
    seen: Fingerprint | None = None

    @property
    def capacity(self) -> int:
        """Cache columns that one row may need."""
        return self.ids.shape[1] - min(self.pads) + self.max_new + self.block_size + 1


@dataclass
class Row:
    """Host-side record of one row."""

    index: int
    prompt: int
    new: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    reason: str | None = None

    @property
    def committed(self) -> int:
        """Logical tokens so far, the anchor included."""
        return self.prompt + len(self.new)


def needs_step(job: Job) -> str | None:
    """What makes several rows decode in step, one token per pass, as plain decoding does; None when nothing does."""
    if job.warp.kind == "stateful":
        return "a stateful logits processor"
    if not job.stops.rowwise:
        return "a custom stopping criterion"
    return None


class Decoding:
    """The state of one running call.

    Args:
        job: what to do.
        target: who verifies.
        drafter: who drafts; None decodes one token per pass through the same loop.
        state: a target state with some of the prompt already committed, or None.
        session: the drafter's session that belongs to ``state``.
        keep_rows: rows stay in the caches when they end (sessions that go on later).
    """

    def __init__(
        self,
        job: Job,
        target: Target,
        drafter: Drafter | None,
        state: TargetState | None = None,
        session: DraftSession | None = None,
        keep_rows: bool = False,
    ) -> None:
        self.job, self.target, self.drafter = job, target, drafter
        batch, width = job.ids.shape
        self.device, self.vocab_size = target.device, target.vocab_size
        self.stats = job.stats
        self.stats.rule = job.rule
        self.stats.path = target.name
        self.stats.row_rounds = [0] * batch
        self.stats.emitted = [[] for _ in range(batch)]
        self.stats.seconds = dict.fromkeys(("prefill", "draft", "verify", "rest"), 0.0)
        self.lockstep = batch > 1 and needs_step(job) is not None
        self.keep_rows = keep_rows or self.lockstep
        self.rows = [Row(r, width - pad) for r, pad in enumerate(job.pads)]
        self.active = list(self.rows)
        self.ids = torch.empty(batch, width + min(job.max_new, 4096), dtype=torch.long, device=self.device)
        self.ids[:, :width] = job.ids
        self.noise = Noise(job.seeds.to(self.device))
        self.state, self.session = state, session
        self._asked: dict[int, str | None] = {}

    def run(self) -> list[Row]:
        """Decode until every row has ended; returns the rows in order."""
        began = time.perf_counter()
        with torch.no_grad():
            self._open()
            self._prefill()
            while self.active:
                self._round()
        seconds = self.stats.seconds
        seconds["rest"] = max(0.0, time.perf_counter() - began - sum(seconds.values()))
        self.stats.finish_reason = [row.reason for row in self.rows]
        self.stats.notes += [*self.job.lengths.notes(), *getattr(self.session, "notes", [])]
        self.stats.modelled_cost = self.job.lengths.modelled_cost
        return self.rows

    def close(self) -> None:
        """Release both sides."""
        if self.session is not None:
            self.session.close()
        if self.state is not None:
            self.state.close()

    # -- set-up and prefill ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        job, batch = self.job, len(self.rows)
        capacity = job.capacity
        if self.state is None:
            taps = tuple(self.drafter.taps) if self.drafter is not None else ()
            self.state = self.target.open(batch, capacity, taps, job.seen)
        if self.drafter is None or self.lockstep:
            return
        request = DraftRequest(
            batch_size=batch,
            device=self.device,
            dtype=self.target.dtype,
            vocab_size=self.vocab_size,
            rule=job.rule,
            warp=job.warp.draft_warp(),
            capacity=capacity,
            target_cache=self.state,
            prompt_lengths=upload([row.prompt for row in self.rows], self.device),
            recorder=self.target.recorder,
        )
        if self.session is None:
            self.session = self.drafter.start(request)
        else:
            self.session.request = request

    def _prefill(self) -> None:
        """Run what is not yet cached of every prompt, in chunks, and draw the first new token of each row."""
        state = self.state
        assert state is not None
        began = time.perf_counter()
        lengths = [row.prompt for row in self.rows]
        done = list(state.lengths)
        missing = [length - start for length, start in zip(lengths, done, strict=True)]
        width = max(missing)
        self.job.lengths.begin(missing, getattr(self.session, "lazy", False))
        left = torch.zeros(len(self.rows), width, dtype=torch.long, device=self.device)
        for row, (length, start) in enumerate(zip(lengths, done, strict=True)):
            pad = self.job.pads[row]
            left[row, : length - start] = self.ids[row, pad + start : pad + length]
        first: Tensor | None = None
        chunk = width if self.target.whole_prefill else self.job.chunk
        for at in range(0, width, chunk):
            tokens = left[:, at : at + chunk]
            host = [max(0, min(rest - at, tokens.shape[1])) for rest in missing]
            ends = [0 < rest - at <= tokens.shape[1] for rest in missing]
            counts = upload(host, self.device)
            result = state.forward(tokens, counts, head="last" if any(ends) else None)
            state.advance(host)
            if self.session is not None:
                self.session.commit(tokens, counts, result.taps)
            if result.logits is not None:
                ended = upload(ends, self.device)[:, None, None]
                first = result.logits if first is None else torch.where(ended, result.logits, first)
        assert first is not None
        self.stats.prompt_tokens_computed = sum(lengths) - sum(done)
        proposal = Proposal.empty(len(self.rows), self.device)
        self._judge(first, proposal, self.noise.round(upload(lengths, self.device)), prefill=True)
        self.stats.seconds["prefill"] += time.perf_counter() - began

    # -- one round ---------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        state = self.state
        assert state is not None
        began = time.perf_counter()
        self.stats.rounds += 1
        self.job.feed.round_begins()
        committed = upload([row.committed for row in self.active], self.device)
        noise = self.noise.round(committed)
        anchor = upload([row.new[-1] for row in self.active], self.device)
        proposal = self._propose(anchor, noise)
        drafted = time.perf_counter()
        tokens = torch.cat([anchor[:, None], proposal.tokens.clamp(0, self.vocab_size - 1)], dim=1)
        result = state.forward(tokens, proposal.lengths + 1)
        assert result.logits is not None
        passed = time.perf_counter()
        kept = self._judge(result.logits, proposal, noise, tokens=tokens, taps=result.taps)
        seconds = self.stats.seconds
        seconds["draft"] += drafted - began
        seconds["verify"] += kept - drafted
        self.stats.accept_seconds += kept - passed

    def _propose(self, anchor: Tensor, noise: RoundNoise) -> Proposal:
        """Ask the drafter, within each row's budget, the target's position limit, and what pays."""
        limits = [self._limit(row) for row in self.active]
        if self.session is None or max(limits) <= 0:
            return Proposal.empty(len(self.active), self.device)
        limits = self.job.lengths.choose(limits, self._outlooks(anchor))
        most = max(limits)
        if most <= 0:
            return Proposal.empty(len(self.active), self.device)
        bound = upload(limits, self.device)
        proposal = self.session.propose(anchor, bound, noise)
        if proposal.tokens.shape[0] != len(self.active):
            raise InvalidInputError(
                f"the drafter proposed {proposal.tokens.shape[0]} rows for a batch of {len(self.active)}; "
                "a session must follow select()"
            )
        proposal.lengths = torch.minimum(proposal.lengths, bound)
        return proposal if proposal.block <= most else proposal.narrowed(most)

    def _outlooks(self, anchor: Tensor) -> list[Outlook]:
        """What each row's next proposal would be; nothing is asked when lengths do not depend on it."""
        if not self.job.lengths.adapts:
            return []
        look = getattr(self.session, "outlook", None)
        return look(anchor) if look else [Outlook("drafted", self.job.block_size)] * len(self.active)

    def _limit(self, row: Row) -> int:
        """Most tokens that may be drafted for this row now: each round adds one more of the target's own."""
        limit = min(self.job.block_size, self.job.max_new - len(row.new) - 1)
        if self.target.max_positions is not None:
            limit = min(limit, self.target.max_positions - row.committed)
        return max(0, limit)

    def _judge(
        self,
        logits: Tensor,
        proposal: Proposal,
        noise: RoundNoise,
        *,
        tokens: Tensor | None = None,
        taps: Tensor | None = None,
        prefill: bool = False,
    ) -> float:
        """Process, verify, read back once, commit. Returns the time of the read-back."""
        scores, verdict = self._verify(logits, proposal, noise)
        packed = torch.cat(
            [
                torch.stack([verdict.accepted, verdict.next_token, verdict.bad.long(), proposal.lengths], 1),
                proposal.tokens,
            ],
            1,
        )
        table = packed.tolist()  # the round's one read-back
        read = time.perf_counter()
        for row, line in zip(self.active, table, strict=True):
            if line[2]:
                raise NumericalError(
                    f"row {row.index}, new token {len(row.new)} (or up to {line[0]} after it): the target's logits are "
                    "NaN, +inf or all -inf; check its weights and dtype, and the logits processors"
                )
        append = self._append_in_step if self.lockstep else self._append_rows
        counts = append(table, scores, logits, prefill)
        if not prefill:
            assert self.state is not None and tokens is not None
            self.state.advance(counts)
            if self.session is not None:
                self.session.commit(tokens, upload(counts, self.device), taps)
            self.job.lengths.settle([line[3] for line in table], [line[0] for line in table], counts)
            self._let_go()
        self._drop_ended()
        return read

    def _let_go(self) -> None:
        """Close a drafter that costs too much even while it is not asked; conversations keep theirs."""
        if self.session is not None and self.job.lengths.given_up and not self.keep_rows:
            self.session.close()
            self.session = None
            self.stats.notes.append("the drafter was let go: keeping its context up to date costs more than it brings")

    def _verify(self, logits: Tensor, proposal: Proposal, noise: RoundNoise) -> tuple[Tensor | None, Verdict]:
        """Scores ``[B, T, V]`` (None when they are the logits themselves) and the verdict."""
        warp, rule = self.job.warp, self.job.rule
        if warp.kind == "none":
            return None, verify(rule, logits, proposal, noise)
        if warp.kind != "stateful":
            scores = warp.block(
                [self._prefix(row) for row in self.active] if warp.needs_ids else [],
                logits,
                proposal.tokens,
                rows=[row.index for row in self.active],
            )
            return scores, verify(rule, scores, proposal, noise)
        if self.lockstep:
            length = self.job.ids.shape[1] + len(self.active[0].new)
            scores = warp.lockstep(self.ids[:, :length], logits[:, 0])[:, None]
            return scores, verify(rule, scores, proposal, noise)
        row, prefix = self.active[0], self._prefix(self.active[0])

        def score(drafts: Tensor, row_logits: Tensor) -> Tensor:
            return warp.step([torch.cat([prefix, drafts])], row_logits)

        def ends(drafts: Tensor, seen: list[Tensor]) -> bool:
            kept = (*(step[None] for step in row.scores), *seen) if self.job.keep_scores else None
            ids = torch.cat([prefix, drafts])
            reason = self._asked[len(ids)] = self.job.stops.check(ids[None], kept)
            return reason is not None

        verdict, scores = verify_in_order(rule, logits, proposal, noise, score, ends)
        return scores, verdict

    def _prefix(self, row: Row) -> Tensor:
        return self.ids[row.index, : self.job.ids.shape[1] + len(row.new)]

    def _write(self, row: Row, tokens: Sequence[int]) -> None:
        """Put tokens behind a row's ids, growing the buffer when a long request fills it."""
        at = self.job.ids.shape[1] + len(row.new)
        if at + len(tokens) > self.ids.shape[1]:
            self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
        self.ids[row.index, at : at + len(tokens)] = upload(tokens, self.device)

    def _append_rows(self, table: list[list[int]], scores: Tensor | None, logits: Tensor, prefill: bool) -> list[int]:
        """Commit each row's accepted drafts and next token; returns how many tokens stood per row."""
        counts = []
        for at, (row, line) in enumerate(zip(self.active, table, strict=True)):
            accepted, following, _, length, *drafts = line
            fresh = [*drafts[:accepted], following]
            self._write(row, fresh)
            emitted = len(fresh)
            for slot, token in enumerate(fresh):
                self._keep(row, token, scores, logits, at, slot)
                row.reason = self._stop(row, token)
                self.job.feed.push(row.index, [token], finished=row.reason is not None)
                if row.reason is not None:
                    emitted = slot + 1
                    break
            self._book(row, length, min(accepted, emitted), emitted, prefill)
            counts.append(emitted)
        return counts

    def _append_in_step(
        self, table: list[list[int]], scores: Tensor | None, logits: Tensor, prefill: bool
    ) -> list[int]:
        """One token for every row, ended rows included (they get padding), with the calls of plain decoding."""
        running = [row.reason is None for row in self.active]
        for at, (row, line) in enumerate(zip(self.active, table, strict=True)):
            token = line[1] if running[at] else self.job.pad_token
            self._write(row, [token])
            self._keep(row, token, scores, logits, at, 0)
        length = self.job.ids.shape[1] + len(self.active[0].new)
        kept = None
        if self.job.keep_scores:
            kept = tuple(torch.stack(step) for step in zip(*(row.scores for row in self.active), strict=True))
        reasons = self.job.stops.check_batch(self.ids[:, :length], kept)
        for at, row in enumerate(self.active):
            if running[at]:
                row.reason = reasons[at]
                self.job.feed.push(row.index, row.new[-1:], finished=row.reason is not None)
                self._book(row, 0, 0, 1, prefill)
        return [1] * len(self.active)

    def _keep(self, row: Row, token: int, scores: Tensor | None, logits: Tensor, at: int, slot: int) -> None:
        row.new.append(token)
        if self.job.keep_logits:
            row.logits.append(logits[at, slot].clone())
        if self.job.keep_scores:
            row.scores.append((logits if scores is None else scores)[at, slot].clone())

    def _stop(self, row: Row, token: int) -> str | None:
        stops, length = self.job.stops, self.job.ids.shape[1] + len(row.new)
        if length in self._asked:  # slot by slot, the criteria have seen this token already
            return self._asked.pop(length)
        if stops.quick:
            return stops.quick_check(token, length)
        kept = tuple(step[None] for step in row.scores) if self.job.keep_scores else None
        return stops.check(self.ids[row.index : row.index + 1, :length], kept)

    def _book(self, row: Row, proposed: int, accepted: int, emitted: int, prefill: bool) -> None:
        if prefill:
            self.stats.emitted[row.index].append(emitted)
        else:
            self.stats.count(row.index, proposed, accepted, emitted)

    def _drop_ended(self) -> None:
        """Rows that ended leave the batch, and their work with them."""
        if all(row.reason is not None for row in self.active):
            self.active = []
            return
        if self.keep_rows:
            return
        keep = [at for at, row in enumerate(self.active) if row.reason is None]
        if len(keep) == len(self.active):
            return
        self.active = [self.active[at] for at in keep]
        rows = upload(keep, self.device)
        self.noise = self.noise.select(rows)
        assert self.state is not None
        self.state.select(keep)
        self.job.lengths.select(keep)
        if self.session is not None:
            self.session.select(rows)
