"""The decode loop of native mode: the only one. Every policy, every cache and every kind of model runs through it.

A pass is one call of the denoiser for all rows that are still at work, each in its own phase: some read their
prompt, some
denoise, some write the keys and values of a block that has just closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdiff.diffusion.caches import BlockCache, PlanInput
from specdiff.diffusion.canvas import NOT_YET, pack, unpack
from specdiff.diffusion.denoiser import DenoiserLike, PassInput, logit_rows
from specdiff.diffusion.draws import REMASK, CounterDraws, Draws
from specdiff.diffusion.policies import Decision, Policy, View, committed
from specdiff.diffusion.policies.assisted import AdaptiveParallel
from specdiff.diffusion.policies.uniform import EntropyBound
from specdiff.diffusion.sampling import Sampling
from specdiff.diffusion.schedule import block_steps
from specdiff.diffusion.select import best
from specdiff.diffusion.state import RowState
from specdiff.diffusion.stop import Ending
from specdiff.diffusion.streaming import Stream
from specdiff.diffusion.visibility import block_floor
from specdiff.diffusion.words import place_words
from specdiff.errors import NumericalError

log = logging.getLogger(__name__)

LogitsHook = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``hook(pass, ids [A, N], logits [A, W, V], positions [A, W]) -> logits``."""
TokensHook = Callable[[int, Tensor, Tensor], Tensor]
"""``hook(pass, ids [A, N], noisy [A, N]) -> ids``; prompt and fixed positions cannot be changed."""
Watcher = Callable[[RowState], None]
"""Called after every pass with the rows at work (streaming, trajectory)."""


@dataclass
class Settings:
    """What one call asks for.

    Attributes:
        policy: the decoder.
        sampling: temperature and filters.
        cache: which positions are computed.
        ending: end tokens and stop strings.
        window: keys seen before the open block, or None for all.
        draws: overrides the counter noise.
        logits_hook: sees and may change the logits of every pass.
        tokens_hook: sees and may change the tokens after every pass.
        ar: denoiser-like AR model, for policies that need one.
        watch: called after every pass.
        stream: gets drafts after every pass and tokens once they are settled (one row).
    """

    policy: Policy
    sampling: Sampling
    cache: BlockCache
    ending: Ending
    window: int | None = None
    draws: Draws | None = None
    logits_hook: LogitsHook | None = None
    tokens_hook: TokensHook | None = None
    ar: DenoiserLike | None = None
    watch: list[Watcher] = field(default_factory=list)
    stream: Stream | None = None


@dataclass
class Finished:
    """Rows that have ended.

    Attributes:
        groups: rows that ended in the same pass, as states.
        place: by the caller's row: its group and its index there.
        reason: by row: "eos", "stop" or "length".
        stop: by row: one past the last position to return.
        passes: denoiser passes of the whole batch.
    """

    groups: list[RowState] = field(default_factory=list)
    place: dict[int, tuple[int, int]] = field(default_factory=dict)
    reason: dict[int, str] = field(default_factory=dict)
    stop: dict[int, int] = field(default_factory=dict)
    passes: int = 0

    def row(self, row: int) -> tuple[RowState, int]:
        """The state that holds a row, and the row's index in it."""
        group, index = self.place[row]
        return self.groups[group], index


class Decoder:
    """Runs rows to their end.

    Args:
        denoiser: the model.
        state: the rows.
        settings: the request.
        cache: an open key/value cache to go on with; None opens one if the block cache stores anything.
    """

    def __init__(self, denoiser: DenoiserLike, state: RowState, settings: Settings, cache: object = None) -> None:
        self.denoiser = denoiser
        self.spec = denoiser.spec
        self.state = state
        self.settings = settings
        self.finished = Finished()
        self.kv = cache
        if cache is None and settings.cache.stores:
            self.kv = denoiser.new_cache(state.size, state.canvas.ids.shape[1])
        refused = [i for i in self.spec.refused_ids if i < denoiser.vocab_size]
        self._refused = torch.tensor(refused, dtype=torch.long, device=state.canvas.ids.device)

    def run(self) -> Finished:
        """Pass after pass until every row has ended."""
        self._tell_prompt()  # rows without anything to do leave before the first pass
        self._retire()
        while self.state.size:
            self.step()
            self._retire()
            if self.settings.stream is not None:
                done = self.finished.place.get(0)
                state = self.state if done is None else self.finished.groups[done[0]]
                self.settings.stream.confirm(state, self.finished.stop.get(0))
        return self.finished

    def step(self) -> None:
        """One pass."""
        s = self.state
        self._tell_prompt()
        self._open()
        frame = s.frame(self.spec)
        at_start = s.canvas.positions == s.start[:, None]
        want = torch.where(s.waiting[:, None], at_start, self.settings.policy.wants(frame))
        visible = s.visible(self.spec, self.settings.window)
        plan, want = self._plan(frame.sub, visible, want)
        # phrases look at the whole block, whatever the policy reads of it
        search = self._searching() & ~s.waiting
        whole = frame.noisy & frame.editable & frame.inside & search[:, None]
        widened = (whole & ~want).any(-1)
        want = want | whole
        batch = PassInput(
            ids=s.canvas.ids,
            plan=plan,
            want=want,
            index=s.index(self.spec),
            visible=visible,
            open=frame.inside & ~s.waiting[:, None],
            conditioning=s.conditioning,
            conditioned=s.conditioned,
        )
        logits = self.denoiser.logits(batch, self.kv)
        self.finished.passes += 1
        computed = plan | logit_rows(want, self.spec.shift)
        s.known |= computed
        s.fresh |= computed & (s.canvas.positions < s.start[:, None])
        positions, valid = pack(want)
        logits = self._prepare(logits, positions, valid)
        self._decide(logits, positions, valid, frame.editable, widened)
        s.passes = s.passes + 1
        if self.settings.tokens_hook is not None:
            new = self.settings.tokens_hook(self.finished.passes - 1, s.canvas.ids.clone(), s.canvas.noisy.clone())
            s.canvas.ids = torch.where(frame.editable & ~s.canvas.noisy, new, s.canvas.ids)
        for watch in self.settings.watch:
            watch(s)
        if self.settings.stream is not None:
            self.settings.stream(s)

    def _tell_prompt(self) -> None:
        """Guidance masks the prompt: say where it is."""
        if hasattr(self.denoiser, "prompt"):
            self.denoiser.prompt = self.state.canvas.prompt

    def _open(self) -> None:
        """Open the next block of rows that have none; grant its steps once its first token is there."""
        s, c, policy = self.state, self.state.canvas, self.settings.policy
        new = ~s.opened
        if bool(new.any()):
            far = torch.where(c.noisy & ~c.fixed, c.positions, c.ids.shape[1]).min(-1).values
            lead = torch.minimum(far, c.length - 1)
            if self.spec.block_size is None:
                start, end = s.first, c.length
            else:
                start = block_floor(lead, s.origin, self.spec.block_size)
                end = torch.minimum(start + self.spec.block_size, c.length)
                start = start.clamp(min=0)
            end = torch.where(s.stretch, c.length, end)
            s.start, s.end = torch.where(new, start, s.start), torch.where(new, end, s.end)
            s.step = torch.where(new, 0, s.step)
            s.block = torch.where(new, s.block + 1, s.block)
            s.opened = s.opened | new
            if self.spec.first_token == "ar":
                begins = c.noisy.gather(1, s.start[:, None])[:, 0] & (s.start > 0)
                s.waiting = torch.where(new, begins, s.waiting)
            for memory in (s.per_row, s.per_position):
                for name, value in memory.items():
                    memory[name] = _blank(name, value, new)
            if s.conditioned is not None:
                s.conditioned = s.conditioned & ~new
            if self.spec.corruption == "uniform":
                self._scatter_noise(new.nonzero()[:, 0])
        begin = (s.step == 0) & ~s.waiting
        if bool(begin.any()):
            inside = (c.positions >= s.start[:, None]) & (c.positions < s.end[:, None])
            count = (c.noisy & ~c.fixed & inside).sum(-1)
            share: Tensor | None = None
            if policy.steps is not None:
                each = torch.full_like(count, policy.steps)
                share = each if policy.per_block else block_steps(policy.steps, s.blocks, s.block)
            s.initial = torch.where(begin, count, s.initial)
            s.granted = torch.where(begin, policy.granted(count, share), s.granted)

    def _scatter_noise(self, index: Tensor) -> None:
        """Random tokens at the noisy positions of blocks that have just been opened."""
        s, c = self.state, self.state.canvas
        inside = (c.positions >= s.start[index][:, None]) & (c.positions < s.end[index][:, None])
        positions, valid = pack(c.noisy[index] & inside)
        draws = (self.settings.draws or CounterDraws(s.noise, s.passes)).select(index)
        ids = draws.random_ids(REMASK, positions, self.denoiser.vocab_size)
        c.ids[index] = unpack(c.ids[index], positions, valid, ids)

    def _plan(self, sub: Tensor, visible: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        s, cache = self.state, self.settings.cache
        if not cache.stores:
            return visible, want
        plan = cache.plan(
            PlanInput(
                canvas=s.canvas,
                start=s.start,
                end=s.end,
                sub=sub,
                step=s.step,
                passes=s.passes,
                visible=visible,
                known=s.known,
                fresh=s.fresh,
                want=want,
                seen_confidence=s.seen_confidence,
            )
        )
        plan = plan | (visible & ~s.known)
        if cache.limits_wants:
            want = want & (plan | s.waiting[:, None])
        return plan, want

    def _prepare(self, logits: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        """Hooks, refused ids, and the check for numbers that are none."""
        s = self.state
        if self.settings.logits_hook is not None:
            logits = self.settings.logits_hook(self.finished.passes - 1, s.canvas.ids, logits, positions)
        logits = logits.index_fill(-1, self._refused[self._refused < logits.shape[-1]], -torch.inf)
        late = _last_fixed(s)
        if self.settings.ending.eos is not None and bool((late > 0).any()):
            early = positions < late[:, None]
            blocked = logits.index_fill(-1, self.settings.ending.eos, -torch.inf)
            logits = torch.where(early[..., None], blocked, logits)
        top = logits.amax(-1)
        bad = valid & ~(torch.isfinite(top) & ~torch.isnan(logits).any(-1))
        if bool(bad.any()):
            row = int(bad.any(-1).nonzero()[0])
            where = int(positions[row][bad[row]][0])
            raise NumericalError(
                f"row {int(s.row[row])}, pass {int(s.passes[row])}, position {where}: the denoiser's logits are NaN, "
                "+inf or all -inf"
            )
        return logits

    def _searching(self) -> Tensor:
        """``Bool[A]`` rows with phrases that have not looked for a place in their open block."""
        s = self.state
        wordy = torch.tensor([bool(w) for w in s.words], dtype=torch.bool, device=s.row.device)
        return wordy & (s.step == 0) & (s.searched != s.block)

    def _decide(self, logits: Tensor, positions: Tensor, valid: Tensor, editable: Tensor, widened: Tensor) -> None:
        s, policy = self.state, self.settings.policy
        if self.settings.cache.limits_wants:
            sure = torch.softmax(logits, -1).amax(-1)
            s.seen_confidence = unpack(s.seen_confidence, positions, valid, sure)
        index = s.waiting.nonzero()[:, 0]
        if len(index):
            view = self._view(index, logits[index], positions[index], valid[index], editable[index])
            tokens, confidence, _ = view.propose()
            self._apply(index, view, committed(view, view.open, tokens, confidence))
        ready = ~s.waiting
        s.waiting = torch.zeros_like(s.waiting)
        index = (self._searching() & ready).nonzero()[:, 0]
        if len(index):
            view = self._view(index, logits[index], positions[index], valid[index], editable[index])
            s.searched[index] = s.block[index]
            ready[index] = ~(place_words(s, index, view, self.spec) | widened[index])
        index = ready.nonzero()[:, 0]
        if not len(index):
            return
        view = self._view(index, logits[index], positions[index], valid[index], editable[index])
        if policy.needs_ar:
            view.ar_logits = self._ar_logits(index, view)
        decision = policy.decide(view)
        if policy.sticky:
            decision = _progress(view, decision)
        self._apply(index, view, decision)
        self._remember(index, view, decision)
        s.step[index] += 1

    def _view(self, index: Tensor, logits: Tensor, positions: Tensor, valid: Tensor, editable: Tensor) -> View:
        s = self.state
        c = s.canvas
        draws = (self.settings.draws or CounterDraws(s.noise, s.passes)).select(index)
        memory: dict[str, Tensor] = {k: v[index] for k, v in s.per_row.items()}
        memory.update({k: v[index].gather(1, positions) for k, v in s.per_position.items()})
        return View(
            positions=positions,
            valid=valid,
            ids=c.ids[index].gather(1, positions),
            noisy=c.noisy[index].gather(1, positions) & valid,
            editable=editable.gather(1, positions) & valid,
            confidence=c.confidence[index].gather(1, positions),
            logits=logits,
            step=s.step[index],
            steps=s.granted[index],
            initial=s.initial[index],
            draws=draws,
            sampling=self.settings.sampling,
            memory=memory,
        )

    def _apply(self, index: Tensor, view: View, decision: Decision) -> None:
        """Write a decision: only editable columns change, masks get the mask id, ages and confidences follow."""
        s, c = self.state, self.state.canvas
        may = view.valid & view.editable
        noisy = torch.where(may, decision.noisy, view.noisy)
        ids = torch.where(may, decision.ids, view.ids)
        if self.spec.mask_id is not None:
            ids = torch.where(may & noisy, self.spec.mask_id, ids)
        touched = may & ~noisy & (view.noisy | (ids != view.ids))
        age = torch.where(touched, s.passes[index][:, None], c.age[index].gather(1, view.positions))
        age = torch.where(may & noisy, NOT_YET, age)
        for name, value in (("ids", ids), ("noisy", noisy), ("age", age), ("confidence", decision.confidence)):
            full = getattr(c, name)
            full[index] = unpack(full[index], view.positions, may, value)
        inside = (c.positions >= s.start[index][:, None]) & (c.positions < s.end[index][:, None])
        empty = ~(c.noisy[index] & ~c.fixed[index] & inside).any(-1)
        if decision.keep_open is not None:
            empty = empty & ~decision.keep_open
        if decision.close is not None:
            empty = empty | decision.close
        s.opened[index] = ~empty

    def _remember(self, index: Tensor, view: View, decision: Decision) -> None:
        s = self.state
        for name, value in decision.rows.items():
            if name not in s.per_row:
                s.per_row[name] = _blank(name, value.new_zeros(s.size), torch.ones_like(s.opened))
            s.per_row[name][index] = value
        for name, value in decision.columns.items():
            if name not in s.per_position:
                zero = value.new_zeros(s.size, s.canvas.ids.shape[1])
                s.per_position[name] = _blank(name, zero, torch.ones_like(s.opened))
            s.per_position[name][index] = unpack(s.per_position[name][index], view.positions, view.valid, value)
        if self.spec.self_conditioning and isinstance(self.settings.policy, EntropyBound):
            logits = self.settings.policy.tempered(view)
            if s.conditioning is None or s.conditioning.shape[1:] != logits.shape[1:]:
                s.conditioning = logits.new_zeros(s.size, *logits.shape[1:])
                s.conditioned = torch.zeros_like(s.opened)
            assert s.conditioned is not None
            s.conditioning[index] = logits
            s.conditioned[index] = True

    def _ar_logits(self, index: Tensor, view: View) -> Tensor:
        """The AR model's logits at the view's columns, with the policy's own draft to the left of each."""
        s, c, ar = self.state, self.state.canvas, self.settings.ar
        assert ar is not None and isinstance(self.settings.policy, AdaptiveParallel)
        draft = torch.where(view.open, self.settings.policy.draft(view), view.ids)
        ids = unpack(c.ids[index], view.positions, view.valid, draft)
        want = unpack(torch.zeros_like(c.noisy[index]), view.positions, view.valid, view.valid)
        seen = c.exists[index] & (c.positions < s.end[index][:, None])
        position = c.positions.expand_as(ids)
        none = torch.zeros_like(want)
        batch = PassInput(ids=ids, plan=seen, want=want, index=position, visible=seen, open=none)
        return ar.logits(batch).index_fill(-1, self._refused, -torch.inf)

    def _retire(self) -> None:
        """Take out the rows that have ended."""
        s = self.state
        reasons, stops = self.settings.ending.test(s, self.settings.policy.sticky)
        s.canvas.done = torch.tensor([r is not None for r in reasons], device=s.row.device)
        if not bool(s.canvas.done.any()):
            return
        index = s.canvas.done.nonzero()[:, 0]
        for place, (i, row) in enumerate(zip(index.tolist(), s.row[index].tolist(), strict=True)):
            self.finished.place[row] = (len(self.finished.groups), place)
            self.finished.reason[row] = reasons[i] or "length"
            self.finished.stop[row] = stops[i]
        self.finished.groups.append(s.select(index))
        keep = (~s.canvas.done).nonzero()[:, 0]
        self.state = s.select(keep)
        if self.kv is not None:
            self.denoiser.select(self.kv, keep)


def _blank(name: str, value: Tensor, rows: Tensor) -> Tensor:
    """Policy memory at its start value for ``rows``: -1 for guesses, 1 for float times, otherwise 0."""
    start = -1 if name == "guess" else 1 if name == "time" and value.is_floating_point() else 0
    keep = ~rows if value.dim() == 1 else ~rows[:, None]
    return torch.where(keep, value, start)


def _last_fixed(s: RowState) -> Tensor:
    """``Long[A]`` last fixed position that is not prompt (no end token may come before it); all while words wait."""
    c = s.canvas
    late = torch.where(c.fixed & ~c.prompt & (c.positions >= s.first[:, None]), c.positions, -1).amax(-1)
    wordy = torch.tensor([bool(w) for w in s.words], device=late.device)
    return torch.where(wordy, c.ids.shape[1], late)


def _progress(view: View, decision: Decision) -> Decision:
    """A step that would commit nothing commits the most likely column."""
    stuck = ~(view.open & ~decision.noisy).any(-1) & view.open.any(-1)
    if not bool(stuck.any()):
        return decision
    sure = torch.softmax(view.logits, -1).max(-1)
    forced = best(sure.values, view.open) & stuck[:, None]
    decision.ids = torch.where(forced, sure.indices, decision.ids)
    decision.noisy = decision.noisy & ~forced
    decision.confidence = torch.where(forced, sure.values, decision.confidence)
    return decision


__all__ = ["Decoder", "Finished", "LogitsHook", "Settings", "TokensHook", "Watcher"]
