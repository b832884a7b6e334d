"""One request's state of a DFlash-type drafter, and how its blocks become proposals."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, as_limits, on_host
from specdiff.drafters.context_cache import ContextCache
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.pending import MOST, Pending
from specdiff.errors import InvalidInputError
from specdiff.fast.recording import Outputs, Recordings, bucket
from specdiff.verify.laws import Coupled, Delta, Proposal, Sampled
from specdiff.verify.noise import CounterNoise, Purpose, RoundNoise

log = logging.getLogger(__name__)


class DFlashSession:
    """Keeps the context's keys and values per layer; drafts a block per call.

    Committed taps wait until a draft needs them (or :data:`~specdiff.drafters.pending.MOST` of them wait): rounds
    without a draft cost nothing, and many positions are projected for little more than one.

    The laws that :meth:`propose` uses: ``Delta`` under the greedy rule (argmax), ``Coupled`` under the coupled rule,
    else ``Sampled``. Tokens are drawn left to right when a head looks at the tokens before a slot, each from the law
    that is reported, so ``Sampled`` is exact.
    """

    lazy = True

    def __init__(self, drafter: DFlashDrafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self._runtime = drafter.runtime()
        self._model = self._runtime.model
        config = drafter.config
        weight = drafter.model.fc.weight
        self._compute = weight.dtype
        self._recordings = Recordings(request.recorder)
        self._recorded_for = request
        needed = request.capacity + config.block_size + 1
        waiting = self._runtime.idle.pop(self._shape(needed, torch.is_inference_mode_enabled()), None)
        if waiting is not None:
            self._cache, self._recordings = waiting
            self._cache.restart()
        else:
            self._cache = ContextCache(
                config.num_layers, request.batch_size, config.num_kv_heads, config.head_dim,
                needed, request.device, weight.dtype, buckets=request.recorder is not None,
            )  # fmt: skip
        self._last_position = torch.full((request.batch_size,), -1, dtype=torch.long, device=request.device)
        width = len(config.target_layer_ids) * config.hidden_size
        self._last = torch.zeros(request.batch_size, width, device=request.device, dtype=weight.dtype)
        ids = drafter.draft_ids
        columns = torch.arange(drafter.head.shape[0]) if ids is None else ids
        self._ids = columns.to(request.device)
        self._width = 0
        self._pending = Pending()
        self._stepwise = config.sequential or config.edges or drafter.min_confidence > 0
        self._inside = self._ids < request.vocab_size
        self._all_inside = int(columns.max()) < request.vocab_size
        self._mask = drafter.mask_embedding()
        self.notes: list[str] = []

    def _shape(self, capacity: int, inference: bool) -> Hashable:
        """What two requests must share for one to go on with the other's recordings; None where they never do."""
        request = self.request
        if request.recorder is None or not request.greedy:  # others have a warp of their own
            return None
        place = self.drafter.embedding.data_ptr()
        return request.recorder, request.batch_size, request.vocab_size, bucket(capacity), inference, place

    @property
    def lengths(self) -> Tensor:
        """``Long[B]`` committed tokens per row."""
        self._project()
        return self._cache.lengths

    @torch.no_grad()
    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Take the taps of newly committed tokens."""
        if taps is None:
            raise InvalidInputError("a DFlash drafter reads target states, but commit() got none")
        if tokens.shape[1] == 0:
            return
        self._pending.put(taps, counts)
        if len(self._pending) >= MOST:
            self._project()

    @torch.no_grad()
    def _project(self) -> None:
        """Turn waiting taps into every layer's keys and values."""
        if not len(self._pending):
            return
        taps, counts = self._pending.take()
        features = self._model.tap_features(taps.to(self._compute))
        positions = self._cache.positions(taps.shape[1])
        self._cache.append(self._model.context(features, positions), counts, self._longest())
        at = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[-1])
        last = features.gather(1, at)[:, 0]
        fresh = counts > 0
        self._last = torch.where(fresh[:, None], last, self._last)
        self._last_position = torch.where(fresh, self._cache.lengths - 1, self._last_position)

    def _longest(self) -> int | None:
        """Committed tokens of the longest row, as the target's side knows them on the host."""
        lengths = getattr(self.request.target_cache, "lengths", None)
        return max(lengths, default=0) if isinstance(lengths, list) else None

    @torch.no_grad()
    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """One pass over the block of every row; tokens as the rule wants them."""
        limits = as_limits(limits, self.drafter.block_size)
        slots = int(limits.max()) if on_host(limits) else self.drafter.block_size
        if slots == 0:
            return Proposal.empty(len(anchor), anchor.device)
        longest = self._longest()
        if self._recordings.recorder is None or longest is None or not isinstance(noise, CounterNoise):
            tokens, lengths, logits = self._draft(anchor, limits, noise, slots)
        else:
            tokens, lengths, logits = self._recorded(anchor, limits, noise, longest)
        if logits is None:
            return Proposal(tokens, lengths, Delta())
        law = Coupled() if self.request.rule == "coupled" else Sampled()
        ids = None if self.drafter.draft_ids is None else self._ids
        return Proposal(tokens, lengths, law, logits=logits, draft_ids=ids)

    def _draft(
        self, anchor: Tensor, limits: Tensor, noise: RoundNoise, slots: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens ``Long[B, k]``, lengths ``Long[B]``, and logits ``[B, k, Vd]`` (None under the greedy rule)."""
        self._project()
        # Inference mode spares small operators their bookkeeping; processors of a sampling request never run inside it.
        with torch.inference_mode() if self.request.greedy else torch.no_grad():
            states = self._states(anchor, slots)
            if self._stepwise:
                drawn, rows, sure = self._walk(anchor, states, noise)
            else:
                logits = self._logits(self._model.norm(states))
                drawn = [self._pick(logits, self._race(slots, noise))]
                rows, sure = list(logits.unbind(1)), None
            peaks = [row.amax(-1) for row in rows]
        join = torch.stack if self._stepwise else torch.cat
        tokens = join(drawn, 1)  # made out here, these are ordinary tensors
        if sure is not None:
            limits = torch.minimum(limits, (sure.cumprod(1) >= self.drafter.min_confidence).long().cumprod(1).sum(1))
        finite = torch.isfinite(torch.stack(peaks, 1))  # NaN and an empty row show in the maximum
        lengths = torch.minimum(limits, finite.long().cumprod(1).sum(1))
        return tokens, lengths, None if self.request.greedy else torch.stack(rows, 1)

    def _recorded(
        self, anchor: Tensor, limits: Tensor, noise: CounterNoise, longest: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """:meth:`_draft` as a recording: what a round changes goes in and comes out as tensors of fixed shapes."""
        slots = self.drafter.block_size
        if len(self._pending) > slots + 1:
            self._project()
        cache, waiting = self._cache, self._pending.padded(slots + 1, self._last)
        if cache.reserve(longest + slots + 1) or self._recorded_for is not self.request:
            self._recordings.clear()
            self._recorded_for = self.request
        cache.longest = longest
        state = (cache.lengths, self._last, self._last_position)

        def run(*inputs: Tensor) -> Outputs:
            anchor, limits, row_states, committed, taps, counts, *rest = inputs
            cache.lengths, self._last, self._last_position = rest
            self._pending.put(taps, counts)
            drafted = self._draft(anchor, limits, CounterNoise(row_states, committed), slots)
            return (*drafted, cache.lengths, self._last, self._last_position)

        inputs = (anchor, limits, noise.row_states, noise.lengths, *waiting, *state)
        try:
            tokens, lengths, logits, *after = self._recordings((len(anchor), cache.view), run, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.notes.append(f"drafts are not recorded: {error}")
            log.warning("this draft cannot be recorded (%s); it is run operator by operator", error)
            self._recordings.recorder = None
            cache.lengths, self._last, self._last_position = state
            self._pending = Pending()
            self._pending.put(*waiting)
            return self._draft(anchor, limits, noise, slots)
        cache.lengths, self._last, self._last_position = (tensor for tensor in after if tensor is not None)
        assert tokens is not None and lengths is not None
        return tokens, lengths, logits

    def _states(self, anchor: Tensor, slots: int) -> Tensor:
        """Parallel states ``[B, k, H]`` before the heads."""
        drafter, config = self.drafter, self.drafter.config
        # A row that was rolled back has lost its last taps until the next commit: draft without them.
        known = (self._last_position == self._cache.lengths - 1) & (self._cache.lengths > 0)
        last = self._last * known[:, None].to(self._last.dtype)
        # Slots see each other, and a row's draft must not depend on how many its neighbours may still use: the pass
        # stays as wide as the widest so far.
        self._width = max(self._width, slots)
        width = self._width + int(config.anchor_slot)
        x = self._model.block_input(drafter.embed(anchor[:, None]), last[:, None], self._mask, width)
        visible = self._cache.visible()[:, None]
        states = self._model.run_layers(x, self._cache.read(), visible, self._cache.lengths[:, None])
        return states[:, 0, :slots]

    def _walk(
        self, anchor: Tensor, states: Tensor, noise: RoundNoise
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Left to right: each slot sees the tokens drawn before it, so its law is exactly the one reported.

        With a shortlist the head is read once: its logits for all slots as if no token had been drawn are exact for
        slot 0, and for the others they choose candidates, before anything is drawn. A slot's law is then its own
        logits over its candidates, and 0 elsewhere.

        Returns:
            Tokens ``Long[B]`` and logits by slot: ``[B, Vd]``, or only those of candidates under the greedy rule; and
            ``[B, k]`` estimated acceptance, if drafts are to be cut by it.
        """
        drafter, (batch, slots, _) = self.drafter, states.shape
        window = drafter.config.correction_window
        recent = torch.full((batch, window), -1, dtype=torch.long, device=states.device)
        race = self._race(slots, noise)
        whole = slots == 1 or drafter.config.edges or drafter.min_confidence > 0
        short = 0 if whole else self._runtime.shortlist
        shared = columns = None
        if short:
            shared = self._inside_only(self._runtime.logits(self._model.correct(states, None)))
            columns = shared[:, 1:].topk(short, sorted=False).indices
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        sure: list[Tensor] = []
        for k in range(slots):
            noises = None if race is None else race[:, k]
            if shared is not None and columns is not None and k:
                normed = self._model.correct(states[:, k], drafter.embed(recent))
                token, logits = self._among(normed, columns[:, k - 1], noises)
            elif shared is not None:
                logits = self._warped(shared[:, 0])
                token = self._pick(logits, noises)
            else:
                previous = tokens[-1] if tokens else anchor
                normed = self._model.correct(states[:, k], drafter.embed(recent))
                logits = self._logits(normed, previous)
                token = self._pick(logits, noises)
                if drafter.min_confidence:
                    sure.append(self._model.confidence(normed, previous))
            tokens.append(token)
            rows.append(logits)
            recent = torch.cat([token[:, None], recent], 1)[:, :window]
        return tokens, rows, torch.stack(sure, 1) if sure else None

    def _among(self, normed: Tensor, columns: Tensor, race: Tensor | None) -> tuple[Tensor, Tensor]:
        """A token and its law when only ``columns``: ``Long[B, M]`` may be drawn."""
        few = self._runtime.logits_of(normed, columns)
        if not self._all_inside:
            few = few.masked_fill(~self._inside[columns], float("-inf"))
        if race is None:
            return self._ids[columns.gather(1, few.argmax(-1, keepdim=True))[:, 0]], few
        whole = few.new_full((len(few), len(self._ids)), float("-inf")).scatter_(1, columns, few)
        whole = self._warped(whole)
        return self._pick(whole, race), whole

    def _logits(self, normed: Tensor, previous: Tensor | None = None) -> Tensor:
        """Logits ``[..., Vd]`` after the request's warp (not under the greedy rule, where only the argmax counts)."""
        logits = self._inside_only(self._runtime.logits(normed))
        if previous is not None and self.drafter.config.edges:
            logits = self._model.edge_logits(logits, normed, previous, self._ids)
        return self._warped(logits)

    def _inside_only(self, logits: Tensor) -> Tensor:
        return logits if self._all_inside else logits.masked_fill(~self._inside, float("-inf"))

    def _warped(self, logits: Tensor) -> Tensor:
        return logits if self.request.greedy else self.request.warp(logits)

    def _race(self, slots: int, noise: RoundNoise) -> Tensor | None:
        """Exponentials ``[B, slots, Vd]`` whose race draws the tokens; None under the greedy rule."""
        if self.request.greedy:
            return None
        if self.request.rule == "coupled":
            return noise.coupled(slots, self._ids)
        return noise.exponential(Purpose.DRAFT, slots, self._ids)

    def _pick(self, logits: Tensor, race: Tensor | None) -> Tensor:
        """Target ids ``Long[...]`` of logits ``[..., Vd]``: the argmax, or the winner of the race."""
        return self._ids[(logits if race is None else logits - race.log()).argmax(-1)]

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``, in that order."""
        self._pending.select(rows)
        self._recordings.clear()  # the buffers move
        rows = rows.to(self._last.device)
        self._cache.select(rows)
        self._last, self._last_position = self._last[rows], self._last_position[rows]

    def rollback(self, lengths: Tensor) -> None:
        """Forget committed tokens past ``lengths``; the next commit brings the taps that the direct path needs."""
        self._project()
        self._cache.rollback(lengths)

    def close(self) -> None:
        """Release the cache, or let it wait for a request of the same shape."""
        cache = self._cache
        shape = self._shape(cache.capacity, cache.keys.is_inference())
        if shape is not None and len(cache.lengths) == self.request.batch_size and self._recordings.recorder:
            self._runtime.idle.clear()
            self._runtime.idle[shape] = (cache, self._recordings)
        else:
            self._recordings.clear()
        self._pending = Pending()
        self._cache = ContextCache(1, 0, 1, 2, 1, torch.device("cpu"), torch.float32)
        self._last = self._last[:0]
