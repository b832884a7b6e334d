"""A standalone block-diffusion language model as drafter: any model that native mode runs, with a cache of its own.

How the tokens come about decides what may be said of their law (docs/losslessness.md). The modes:

``single``
    one pass, all tokens drawn from its marginals: ``Sampled``.
``left``
    left to right, one pass a token: an exact left-to-right ``q``, ``Sampled``.
``order``
    several passes by a policy that chooses positions without looking at drawn tokens: ``Sampled`` with ``written``,
    so that
    exposed tokens (a position to the left was written later) are tested as ``Delta``.
``delta``
    any policy at all: ``Delta``.
``redraw``
    any policy; the last pass draws all tokens anew from its own marginals with fresh noise, given the canvas it saw
    (which
    becomes auxiliary randomness): ``Sampled``.

Under ``greedy`` every mode proposes argmax tokens (``Delta``); under ``coupled`` it draws with the target's own noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdiff.diffusion.caches import BlockCache, ExactBlock
from specdiff.diffusion.canvas import Canvas
from specdiff.diffusion.lm import DiffusionLM
from specdiff.diffusion.loop import Decoder, Settings
from specdiff.diffusion.policies import Policy, make_policy
from specdiff.diffusion.sampling import Sampling
from specdiff.diffusion.state import RowState
from specdiff.diffusion.stop import Ending
from specdiff.diffusion.visibility import block_floor
from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.drafters.block_draws import Redraw, RoundDraws
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify.laws import Coupled, Delta, Proposal, Sampled
from specdiff.verify.noise import Noise, RoundNoise

MODES = ("single", "left", "order", "delta", "redraw")


class BlockLMDrafter:
    """A diffusion language model that drafts.

    Args:
        lm: the model (:class:`specdiff.DiffusionLM`); its vocabulary must be the target's.
        block_size: K, drafted tokens per round. Default: the model's block size, less one where the first token of a
            block
            comes from a clean pass; 8 for models without blocks.
        mode: see the module; default "single", or "order" if ``steps`` or ``policy`` is given.
        steps: denoising passes per block, for "order", "delta" and "redraw".
        policy: name or object of a native policy, for "order", "delta" and "redraw".
        min_confidence: draft only up to the first token whose law's peak is below it. The length then depends on laws,
            never on drawn values; refused in the modes "order" and "redraw", where laws depend on revealed draws.
        tokenizer: with ``target_tokenizer``: both are compared, and different vocabularies are refused (see
            :mod:`specdiff.drafters.retokenise` for those).
        target_tokenizer: see ``tokenizer``.
        **options: options of the policy.

    Raises:
        UnsupportedError: the model cannot draft (uniform noise), or the policy does not fit the mode.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        lm: DiffusionLM,
        block_size: int | None = None,
        *,
        mode: str | None = None,
        steps: int | None = None,
        policy: str | Policy | None = None,
        min_confidence: float = 0.0,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if lm.spec.corruption != "mask" or lm.spec.commit != "model":
            raise UnsupportedError(f"{lm.spec.name}: only masked diffusion models with one forward can draft")
        if lm.spec.attention == "block_causal" and lm.spec.alignment == "prompt":
            raise UnsupportedError(
                f"{lm.spec.name}: blocks counted from a prompt's end cannot follow a growing text; "
                "alignment 'absolute' can"
            )
        self.lm = lm
        self.mode = mode or ("single" if steps is None and policy is None else "order")
        if self.mode not in MODES:
            raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        self.block_size = _default_block(lm) if block_size is None else block_size
        if self.block_size < 1:
            raise InvalidInputError(f"block_size must be at least 1, not {self.block_size}")
        if lm.spec.attention == "block_causal" and self.block_size > (lm.spec.block_size or 1):
            raise InvalidInputError(
                f"block_size {self.block_size} is more than the model's blocks of {lm.spec.block_size}"
            )
        self.policy = self._policy(steps, policy, options)
        if not 0 <= min_confidence <= 1:
            raise InvalidInputError(f"min_confidence must be in [0, 1], not {min_confidence}")
        if min_confidence and self.mode in ("order", "redraw"):
            raise UnsupportedError(
                f"mode {self.mode!r} cannot cut its drafts by confidence: their laws depend on revealed draws"
            )
        self.min_confidence = min_confidence
        if tokenizer is not None and target_tokenizer is not None:
            check_same_tokenizer(tokenizer, target_tokenizer)

    def _policy(self, steps: int | None, policy: str | Policy | None, options: dict[str, Any]) -> Policy:
        if self.mode in ("single", "left"):
            if policy is not None or options or steps not in (None, 1 if self.mode == "single" else self.block_size):
                raise InvalidInputError(
                    f"mode {self.mode!r} fixes its passes; steps, policy and options belong to other modes"
                )
            if self.mode == "single":
                return make_policy("quota", {"steps": 1, "score": "left"})
            return make_policy("any_order", {"order": "left"})
        if policy is None:
            policy, options = "quota", {"score": "confidence" if self.mode == "delta" else "peak", **options}
        if isinstance(policy, str) and steps is not None:
            options = {**options, "steps": steps}
        chosen = make_policy(policy, options)
        if chosen.corruption != "mask" or chosen.needs_ar:
            raise UnsupportedError(f"policy {chosen.name!r} cannot draft")
        if self.mode == "order" and (chosen.looks_at_draw or not chosen.sticky):
            raise UnsupportedError(
                f"policy {chosen.name!r} looks at drawn tokens or takes them back, so the law of its tokens is not "
                f"known: "
                "use mode='delta' or mode='redraw'"
            )
        return Redraw(steps=chosen.steps or 2, inner=chosen) if self.mode == "redraw" else chosen

    def start(self, request: DraftRequest) -> BlockLMSession:
        """Open the state of one call."""
        return BlockLMSession(self, request)

    def to(self, *args: Any, **kwargs: Any) -> BlockLMDrafter:
        """Move the model."""
        self.lm.model.to(*args, **kwargs)
        return self


def check_same_tokenizer(ours: Any, theirs: Any) -> None:
    """Refuse two tokenizers that map ids to different strings."""
    a, b = ours.get_vocab(), theirs.get_vocab()
    if a != b:
        differ = sorted(set(a.items()) ^ set(b.items()), key=lambda x: (x[1], x[0]))[:3]
        raise UnsupportedError(
            f"drafter and target have different tokenizers ({len(a)} and {len(b)} entries, first differences "
            f"{differ}): build the drafter without tokenizers and let its text travel with "
            "specdiff.drafters.retokenise.retokenised(drafter, its_tokenizer, target_tokenizer)"
        )


def _default_block(lm: DiffusionLM) -> int:
    return lm.spec.block_size or 8


@dataclass
class _Record:
    """What each slot was drawn from, and when."""

    logits: Tensor
    written: Tensor
    bad: Tensor


class BlockLMSession:
    """State of one request: committed tokens, the model's cache, and which of its entries are final."""

    lazy = True

    def __init__(self, drafter: BlockLMDrafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self.lm, self.spec, self.denoiser = drafter.lm, drafter.lm.spec, drafter.lm.denoiser
        self.vocab = min(self.denoiser.vocab_size, request.vocab_size)
        rows = request.batch_size
        self._room = drafter.block_size + (self.spec.block_size or 0) + 1
        self._ids = torch.zeros(rows, request.capacity + self._room, dtype=torch.long, device=request.device)
        self._known = torch.zeros_like(self._ids, dtype=torch.bool)
        self._fresh = torch.zeros_like(self._known)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=request.device)
        self._cache: BlockCache = BlockCache()
        if self.spec.attention != "full" and self.denoiser.supports_cache:
            self._cache = ExactBlock()
        self._kv: Any = None
        self.passes = 0

    # -- what the engine calls --------------------------------------------------------------------------------------

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """Draft after ``anchor``; block-aligned models draft up to the end of the block that is open."""
        rows, block = len(anchor), self.drafter.block_size
        first = self.lengths + 1
        limits = as_limits(limits, block)
        end = first + block
        if self.spec.attention == "block_causal":
            size = self.spec.block_size or 1
            end = block_floor(first, torch.zeros_like(first), size) + size
            limits = torch.minimum(limits, end - first)
        if not rows or not bool((limits > 0).any()):
            return Proposal(
                tokens=torch.zeros(rows, block, dtype=torch.long, device=anchor.device),
                lengths=torch.zeros_like(limits),
                law=Delta(),
            )
        self._grow(int(end.max()))
        self._ids.scatter_(1, self.lengths[:, None], anchor[:, None])
        return self._draft(first, end, limits, noise)

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Append committed tokens; their keys and values are computed with the next draft."""
        width = tokens.shape[1]
        if not width:
            return
        self._grow(int(self.lengths.max()) + width)
        place = self.lengths[:, None] + torch.arange(width, device=tokens.device)
        real = torch.arange(width, device=tokens.device) < counts[:, None]
        place = place.clamp(max=self._ids.shape[1] - 1)
        old = self._ids.gather(1, place)
        stale = real & (old != tokens)
        self._fresh.scatter_(1, place, self._fresh.gather(1, place) & ~stale)
        self._ids.scatter_(1, place, torch.where(real, tokens, old))
        self.lengths = self.lengths + counts

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``."""
        for name in ("_ids", "_known", "_fresh", "lengths"):
            setattr(self, name, getattr(self, name)[rows])
        if self._kv is not None:
            self._kv.keep_rows = False
            self.denoiser.select(self._kv, rows)
            self._kv.keep_rows = True

    def rollback(self, lengths: Tensor) -> None:
        """Forget committed tokens past ``lengths``."""
        self.lengths = torch.minimum(self.lengths, lengths)
        self._forget(self.lengths)

    def close(self) -> None:
        """Release the cache."""
        self._kv = None

    # -- drafting ---------------------------------------------------------------------------------------------------

    def _draft(self, first: Tensor, end: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        rows, block = len(first), self.drafter.block_size
        device, width = first.device, int(end.max())
        position = torch.arange(width, device=device)
        noisy = (position >= first[:, None]) & (position < end[:, None])
        # ids that the drafter's smaller vocabulary lacks are read as padding: that costs acceptance only
        known = self._ids[:, :width] < self.denoiser.vocab_size
        ids = torch.where(known, self._ids[:, :width], self.spec.pad)
        ids = torch.where(noisy, self.spec.mask_id or 0, ids)
        prompt = position < first[:, None]
        greedy, coupled = self.request.greedy, self.request.rule == "coupled"
        record = _Record(
            logits=torch.zeros(rows, block, self.vocab, device=device),
            written=torch.zeros(rows, block, dtype=torch.long, device=device),
            bad=torch.zeros(rows, block, dtype=torch.bool, device=device),
        )
        state = RowState.build(
            Canvas.build(ids, noisy, prompt, prompt, end),
            Noise(torch.zeros_like(first)),
            self.spec,
            first,
            first + limits,
        )
        state.known, state.fresh = self._known[:, :width].clone(), self._fresh[:, :width].clone()
        if self._cache.stores and self._kv is None:
            self._kv = self.denoiser.new_cache(rows, self._ids.shape[1])
            self._kv.keep_rows = True
        draws = RoundDraws(noise, first, int((end - first).max()), coupled)
        settings = Settings(
            policy=self.drafter.policy,
            sampling=Sampling(temperature=0.0 if greedy else 1.0, convention="sdar"),
            cache=self._cache,
            ending=Ending(),
            draws=draws,
        )
        run = _Run(self, state, settings, record, draws)
        finished = run.decode()
        self.passes += finished.passes
        if self._kv is not None:
            self._kv.all_rows()
        tokens = torch.zeros(rows, block, dtype=torch.long, device=device)
        slot = torch.arange(block, device=device)
        for group in finished.groups:
            place = (group.first[:, None] + slot).clamp(max=width - 1)
            tokens[group.row] = group.canvas.ids.gather(1, place)
            self._known[group.row, :width] = group.known
            self._fresh[group.row, :width] = group.fresh
        return self._proposal(tokens, limits, record, greedy, coupled)

    def _proposal(self, tokens: Tensor, limits: Tensor, record: _Record, greedy: bool, coupled: bool) -> Proposal:
        slot = torch.arange(tokens.shape[1], device=tokens.device)
        # a broken drafter row cuts the proposal before it: that costs speed only
        lengths = torch.minimum(limits, torch.where(record.bad, slot, tokens.shape[1]).amin(-1))
        if self.drafter.min_confidence:
            sure = torch.softmax(record.logits, -1).amax(-1) >= self.drafter.min_confidence
            lengths = torch.minimum(lengths, sure.long().cumprod(-1).sum(-1))
        ids = None
        if self.vocab < self.request.vocab_size:
            ids = torch.arange(self.vocab, device=tokens.device)
        if coupled:
            return Proposal(tokens=tokens, lengths=lengths, law=Coupled())
        if greedy or self.drafter.mode == "delta":
            return Proposal(tokens=tokens, lengths=lengths, law=Delta())
        written = record.written if self.drafter.mode == "order" else None
        return Proposal(
            tokens=tokens, lengths=lengths, law=Sampled(), logits=record.logits, draft_ids=ids, written=written
        )

    def _forget(self, lengths: Tensor) -> None:
        keep = torch.arange(self._ids.shape[1], device=lengths.device) < lengths[:, None]
        self._fresh &= keep
        self._known &= keep

    def _grow(self, need: int) -> None:
        """More room; a grown cache is filled anew with the next draft."""
        if need + self._room <= self._ids.shape[1]:
            return
        extra = max(need + self._room - self._ids.shape[1], self._ids.shape[1])
        self._ids = torch.nn.functional.pad(self._ids, (0, extra))
        self._known = torch.zeros_like(self._ids, dtype=torch.bool)
        self._fresh = torch.zeros_like(self._known)
        self._kv = None


class _Run:
    """One block through the native loop, with the law of every token kept."""

    def __init__(
        self, session: BlockLMSession, state: RowState, settings: Settings, record: _Record, draws: RoundDraws
    ) -> None:
        self.session, self.record, self.draws = session, record, draws
        self.all_rows = torch.arange(state.size, device=state.row.device)
        settings.logits_hook = self._law
        settings.watch.append(self._keep)
        self._last: tuple[Tensor, Tensor] | None = None
        self.decoder = Decoder(session.denoiser, state, settings, session._kv)

    def decode(self) -> Any:
        """Run all rows to the end of their block."""
        return self.decoder.run()

    def _law(self, number: int, ids: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """The drafter's own logits, cut to the target's vocabulary, refused ids out, warped like the target's."""
        s = self.decoder.state
        self.draws.rows = s.row
        logits = logits[..., : self.session.vocab]
        refused = [i for i in self.session.spec.refused_ids if i < self.session.vocab]
        if refused:
            logits = logits.index_fill(-1, torch.tensor(refused, device=logits.device), -torch.inf)
        broken = torch.isnan(logits).any(-1) | ~torch.isfinite(logits.amax(-1))
        logits = torch.where(broken[..., None], torch.zeros((), dtype=logits.dtype, device=logits.device), logits)
        if refused:
            logits = logits.index_fill(-1, torch.tensor(refused, device=logits.device), -torch.inf)
        logits = self.session.request.warp(logits.flatten(0, 1)).view(logits.shape).float()
        self._last = (positions, logits)
        self._mark(s, positions, broken)
        return logits

    def _mark(self, s: RowState, positions: Tensor, broken: Tensor) -> None:
        slot = positions - s.first[:, None]
        inside = broken & (slot >= 0) & (slot < self.record.bad.shape[1])
        row, column = inside.nonzero(as_tuple=True)
        self.record.bad[s.row[row], slot[row, column]] = True

    def _keep(self, s: RowState) -> None:
        """After a pass: the law and the step of every token written in it."""
        assert self._last is not None
        positions, logits = self._last
        slot = positions - s.first[:, None]
        age = s.canvas.age.gather(1, positions)
        new = (slot >= 0) & (slot < self.record.written.shape[1]) & (age == (s.passes - 1)[:, None])
        if self.session.drafter.mode == "redraw":
            # all tokens of a row that has just closed come from this pass
            closed = ~s.opened
            new = (
                (slot >= 0)
                & (slot < self.record.written.shape[1])
                & closed[:, None]
                & ~s.canvas.noisy.gather(1, positions)
            )
        row, column = new.nonzero(as_tuple=True)
        self.record.logits[s.row[row], slot[row, column]] = logits[row, column]
        self.record.written[s.row[row], slot[row, column]] = s.passes[row] - 1
