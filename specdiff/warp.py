"""Hugging Face logits processors over a drafted block, with exactly the calls' results of plain decoding.

A stock processor is *pure* (looks at the scores alone), *prefix*-dependent (a function of the row's ids and scores) or
*stateful* (remembers its calls, or runs code we cannot see). Pure ones run on the whole block at once, on 2-D scores
``[B * T, V]``. Prefix-dependent ones run for every slot with the ids that plain decoding would show them, the drafted
tokens before the slot included. Stateful ones, every subclass and every unknown class among them, run one position at
a time and only once the position before it is accepted, so that they see the calls of plain decoding and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdiff.errors import InvalidInputError, UnsupportedError

Kind = Literal["none", "pure", "prefix", "stateful"]

WARPERS: frozenset[str] = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
    }
)
"""Pure processors that never look at a vocabulary id: right for logits of any width, a drafter's too."""

PURE: frozenset[str] = WARPERS | {
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
}
"""Functions of one row of scores alone."""

PREFIX: frozenset[str] = frozenset(
    {
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WatermarkLogitsProcessor",
    }
)
"""Functions of one row's ids and scores (and of the row's place in the batch, see ``_bind``)."""

STATEFUL: frozenset[str] = frozenset(
    {
        # The user's function may count its calls, and may not survive a drafted prefix that breaks the constraint.
        "PrefixConstrainedLogitsProcessor",
        # Keeps a KV cache of its own that grows by one token per call.
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        # Keeps the history of contexts it has watermarked.
        "SynthIDTextWatermarkLogitsProcessor",
    }
)
"""Remember their calls, or run code of the user's."""

REFUSED: dict[str, str] = {
    "ClassifierFreeGuidanceLogitsProcessor": "it needs scores of twice the batch (MusicGen); use guidance_scale=",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs scores of twice the batch (Dia)",
    "DiaEOSChannelFilterLogitsProcessor": "it works on audio channels folded into the batch (Dia)",
    "DiaEOSDelayPatternLogitsProcessor": "it works on audio channels folded into the batch (Dia)",
    "WhisperNoSpeechDetection": "it needs an encoder's inputs (Whisper)",
}
"""Stock processors of models that are no causal language models: class name -> reason."""

_RAISES_ON_NAN = frozenset({"TopHLogitsWarper", "EtaLogitsWarper"})
_ROW_BOUND = frozenset(
    {
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
    }
)
_STOCK_MODULE = "transformers.generation.logits_process"


def classify(processor: object) -> Literal["pure", "prefix", "stateful"]:
    """Sort one processor.

    Args:
        processor: any callable ``(ids [B, L], scores [B, V]) -> scores``. Only the exact stock classes of transformers
            are known; a subclass or any other class is "stateful".

    Raises:
        UnsupportedError: for a stock processor that no causal language model can use.
    """
    cls = type(processor)
    if cls.__module__ != _STOCK_MODULE:
        return "stateful"
    name = cls.__name__
    if name in REFUSED:
        raise UnsupportedError(f"logits processor {name} cannot be used here: {REFUSED[name]}; remove it from the list")
    if name in PURE:
        return "pure"
    if name in PREFIX:
        return "prefix"
    return "stateful"


class BlockWarp:
    """A list of logits processors that can be applied to a whole block of positions.

    Args:
        processors: the list that Hugging Face's ``generate`` built (or any list of processors), in its order.
        batch_size: rows of the whole request; needed only when rows are dropped before the first call. Otherwise taken
            from the first call.

    Attributes:
        kind: the strongest class in the list: "none", "pure", "prefix" or "stateful".

    Raises:
        UnsupportedError: for a stock processor that no causal language model can use.
    """

    def __init__(self, processors: LogitsProcessorList | None, *, batch_size: int | None = None) -> None:
        self.processors = LogitsProcessorList(processors or [])
        self._kinds = [classify(p) for p in self.processors]
        self._batch_size = batch_size
        self.kind: Kind = "none"
        for kind in ("pure", "prefix", "stateful"):
            if kind in self._kinds:
                self.kind = kind

    @property
    def needs_ids(self) -> bool:
        """True when a result depends on the ids, so that the caller has to keep them at hand."""
        return self.kind in ("prefix", "stateful")

    def block(
        self,
        ids: Sequence[Tensor],
        scores: Tensor,
        drafts: Tensor,
        *,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Scores of every position of a block, as plain decoding would give them one by one.

        Args:
            ids: per row ``Long[L_r]``, everything plain decoding would hold before slot 0 (left padding, prompt,
                committed tokens, the anchor last). May be empty when ``needs_ids`` is False.
            scores: ``[B, T, V]`` raw logits; slot i follows ``ids[r] + drafts[r, :i]``. Not modified.
            drafts: ``Long[B, T - 1]`` drafted tokens; entries past a row's proposal may hold anything.
            rows: index of each row in the request's batch, when rows have been dropped; default ``0 .. B-1``.

        Returns:
            ``[B, T, V]`` processed scores.

        Raises:
            InvalidInputError: if the list holds a stateful processor; use :meth:`step` or :meth:`lockstep`.
        """
        if self.kind == "stateful":
            raise InvalidInputError(
                "a stateful logits processor cannot run on a block; call step() position by position"
            )
        if self.kind == "none":
            return scores
        batch, slots, vocab = scores.shape
        flat = scores.reshape(batch * slots, vocab)
        groups = self._groups(ids, drafts, batch, slots, vocab, rows) if self.kind == "prefix" else []
        for processor, kind in zip(self.processors, self._kinds, strict=True):
            if kind == "pure":
                flat = _run_pure(processor, flat)
                continue
            out = torch.empty_like(flat)
            for places, prefixes, group_rows in groups:
                out[places] = self._bind(processor, group_rows)(prefixes, flat[places])
            flat = out
        return flat.view(batch, slots, vocab)

    def step(self, ids: Sequence[Tensor], scores: Tensor, *, rows: Sequence[int] | None = None) -> Tensor:
        """Scores of one position per row.

        Args:
            ids: per row ``Long[L_r]``, everything before the position.
            scores: ``[B, V]`` raw logits. Not modified.
            rows: as in :meth:`block`.

        Returns:
            ``[B, V]`` processed scores.

        Raises:
            InvalidInputError: for a stateful list with more than one row of unequal length (use :meth:`lockstep`).
        """
        if self.kind != "stateful":
            return self.block(
                ids, scores[:, None], ids[0].new_zeros(len(ids), 0) if ids else scores[:, :0].long(), rows=rows
            )[:, 0]
        if len({len(row) for row in ids}) > 1:
            raise InvalidInputError("stateful logits processors need rows of equal length; decode in lockstep")
        return self.lockstep(torch.stack(list(ids)), scores)

    def lockstep(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The call of plain decoding: all rows of the request, equally long.

        Args:
            ids: ``Long[B, L]`` with left padding, finished rows included (they hold padding tokens).
            scores: ``[B, V]`` raw logits. Not modified.
        """
        if self.kind == "none":
            return scores
        return self.processors(cast(torch.LongTensor, ids), scores.clone())

    def draft_warp(self) -> Callable[[Tensor], Tensor]:
        """The filters of this request for a drafter's own logits.

        Returns:
            A function ``[..., Vd] -> [..., Vd]`` that applies the warpers which never look at a vocabulary id
            (temperature, top-k, top-p, min-p, ...), in their order. It works for any width, so also for a pruned draft
            vocabulary. Rows with NaN come back as NaN.
        """
        warpers = [p for p in self.processors if type(p).__module__ == _STOCK_MODULE and type(p).__name__ in WARPERS]

        def warp(logits: Tensor) -> Tensor:
            if not warpers or not logits.numel():
                return logits
            flat = logits.reshape(-1, logits.shape[-1])
            for warper in warpers:
                flat = _run_pure(warper, flat)
            return flat.view(logits.shape)

        return warp

    def _groups(
        self, ids: Sequence[Tensor], drafts: Tensor, batch: int, slots: int, vocab: int, rows: Sequence[int] | None
    ) -> list[tuple[Tensor, Tensor, list[int]]]:
        """Places in the flattened block that share a prefix length: (``Long[n]``, ids ``Long[n, L]``, request rows)."""
        if len(ids) != batch:
            raise InvalidInputError(f"ids must hold one tensor per row: got {len(ids)} for {batch} rows")
        names = list(range(batch)) if rows is None else list(rows)
        if self._batch_size is None:
            self._batch_size = max(batch, max(names, default=0) + 1)
        safe = drafts.clamp(0, vocab - 1)
        full = [torch.cat([row, safe[r].to(row.device)]) for r, row in enumerate(ids)]
        by_length: dict[int, list[tuple[int, int]]] = {}
        for r, row in enumerate(ids):
            for slot in range(slots):
                by_length.setdefault(len(row) + slot, []).append((r, slot))
        return [
            (
                torch.tensor([r * slots + slot for r, slot in pairs], device=drafts.device),
                torch.stack([full[r][:length] for r, _ in pairs]),
                [names[r] for r, _ in pairs],
            )
            for length, pairs in by_length.items()
        ]

    def _bind(self, processor: Any, rows: list[int]) -> Any:
        """``processor`` as seen by the given request rows (some stock classes hold one entry per row of the batch)."""
        name = type(processor).__name__
        if name not in _ROW_BOUND:
            return processor
        bound = copy.copy(processor)
        if name == "RepetitionPenaltyLogitsProcessor":
            if isinstance(processor.prompt_ignore_length, Tensor):
                index = torch.tensor(rows, device=processor.prompt_ignore_length.device)
                bound.prompt_ignore_length = processor.prompt_ignore_length[index]
            return bound
        if name == "EncoderRepetitionPenaltyLogitsProcessor":
            held = processor.encoder_input_ids.shape[0]
            index = torch.tensor(rows, device=processor.encoder_input_ids.device) // self._expand(held)
            bound.encoder_input_ids = processor.encoder_input_ids[index]
            return bound
        factor = self._expand(processor.batch_size)
        bound.generated_ngrams = [processor.generated_ngrams[r // factor] for r in rows]
        bound.batch_size = len(rows)
        return bound

    def _expand(self, held: int) -> int:
        """Sequences per input row (``num_return_sequences``)."""
        return max(1, (self._batch_size or held) // held)


def _run_pure(processor: Any, flat: Tensor) -> Tensor:
    """Run a pure processor on ``[N, V]``. Rows with NaN stay NaN instead of raising in some classes."""
    if type(processor).__name__ not in _RAISES_ON_NAN:
        return processor(None, flat)
    bad = flat.isnan().any(dim=-1, keepdim=True)
    return torch.where(bad, float("nan"), processor(None, torch.where(bad, 0.0, flat)))
