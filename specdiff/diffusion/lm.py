"""DiffusionLM: native decoding with a diffusion language model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdiff.diffusion.caches import BlockCache
from specdiff.diffusion.checkpoints import denoiser_for, load, spec_for
from specdiff.diffusion.denoiser import Adapter, DenoiserLike
from specdiff.diffusion.draws import Draws
from specdiff.diffusion.elbo import ElboScore, monte_carlo_elbo
from specdiff.diffusion.infill import Infilling
from specdiff.diffusion.loop import Decoder, Finished, LogitsHook, TokensHook
from specdiff.diffusion.output import DiffusionOutput, collect
from specdiff.diffusion.policies import Policy
from specdiff.diffusion.request import Span, compact, generation_canvas, make_noise, per_row
from specdiff.diffusion.settings import choose, notes_of
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.state import RowState
from specdiff.diffusion.stop import Ending
from specdiff.diffusion.streaming import Stream, Trajectory
from specdiff.diffusion.words import check_words, missing_words
from specdiff.errors import InvalidInputError, UnsupportedError

log = logging.getLogger(__name__)


class DiffusionLM(Infilling):
    """A diffusion language model with every published decoder.

    Args:
        model: a loaded Hugging Face model (causal, masked or DiffusionGemma class), put into eval mode; or an object
            with the denoiser's methods.
        preset: name of a published model family (:data:`specdiff.diffusion.presets.PRESETS`), or a :class:`DLMSpec`.
            None reads it from the model's config.
        tokenizer: for text in and out and stop strings; a masked LM takes its mask id from it.
        adapter: weights that act on the open block alone (dual-mode models).
        **changes: attributes of the spec to change, e.g. ``mask_id=99``.
    """

    def __init__(
        self,
        model: Any,
        preset: str | DLMSpec | None = None,
        *,
        tokenizer: Any = None,
        adapter: Adapter | None = None,
        **changes: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec_for(model, preset, tokenizer, changes)
        if isinstance(model, nn.Module):
            model.eval()
        self.adapter = adapter
        self.denoiser: DenoiserLike = denoiser_for(model, self.spec, adapter)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, preset: str | DLMSpec | None = None, *, tokenizer: Any = None, **kwargs: Any
    ) -> DiffusionLM:
        """Load a public checkpoint into native classes.

        Args:
            name_or_path: a folder or a hub id; hub options (``revision``, ``token``, ``cache_dir``,
                ``local_files_only``) and
                ``dtype``, ``device_map``, ``attn_implementation`` work as in transformers.
            preset: overrides what the config says.
            tokenizer: overrides the one in the folder.
            **kwargs: loading options; attributes of :class:`DLMSpec` change the spec.
        """
        changes = {k: kwargs.pop(k) for k in list(kwargs) if k in DLMSpec.__dataclass_fields__}
        model, found, spec = load(name_or_path, preset, kwargs, tokenizer, "mask_id" in changes)
        return cls(model, spec, tokenizer=tokenizer or found, **changes)

    @classmethod
    def from_adapter(cls, base: Any, folder: str, *, tokenizer: Any = None, **changes: Any) -> DiffusionLM:
        """A dual-mode model: a causal LM and a trained adapter (:mod:`specdiff.diffusion.dual`).

        Args:
            base: the causal LM the adapter was trained for; it is not altered.
            folder: the adapter's files.
            tokenizer: the base's tokenizer.
            **changes: attributes of the spec to change.
        """
        from specdiff.diffusion.dual import DualAdapter

        adapter, spec = DualAdapter.load(base, folder)
        return cls(adapter.model, spec, tokenizer=tokenizer, adapter=adapter, **changes)

    @property
    def ar(self) -> Any:
        """The model used autoregressively; only shift-1 models with causal clean tokens have this mode."""
        if self.spec.shift != 1 or self.spec.attention not in ("causal", "causal_context"):
            raise UnsupportedError(
                f"{self.spec.name}: not an autoregressive model (shift 1 and causal clean tokens are)"
            )
        return getattr(self.adapter, "base", self.model)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        policy: str | Policy | None = None,
        cache: str | BlockCache | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool | None = None,
        cfg_scale: float = 0.0,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        draws: str | Draws = "counter",
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        fixed: Span | Sequence[Span] | None = None,
        force_words_ids: Sequence[Sequence[int]] | None = None,
        block_size: int | None = None,
        context_window: int | None = None,
        logits_hook: LogitsHook | None = None,
        tokens_hook: TokensHook | None = None,
        ar: Any = None,
        streamer: Any = None,
        return_dict_in_generate: bool = False,
        output_trajectory: bool = False,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor | DiffusionOutput:
        """Generate text after the prompts.

        Args:
            input_ids: ``Long[B, P]``, padded on either side if ``attention_mask`` says so.
            attention_mask: ``[B, P]``, 1 where real.
            max_new_tokens: exactly so many tokens, unless a row ends earlier (default 128).
            max_length: prompt (with padding) plus new tokens, if ``max_new_tokens`` is not given.
            policy: name (:data:`specdiff.diffusion.policies.POLICIES`) or object; default that of the spec.
            cache: "none", "block", "sub_block", "prefix", "dual", "delayed", "certainty", or an object.
            temperature: 0 is greedy.
            top_k: filter.
            top_p: filter.
            do_sample: False is temperature 0; True with temperature 0 is temperature 1.
            cfg_scale: classifier-free guidance; 0 is none.
            seed: one for the call, or one per row; row r of a batch equals its solo run with its row seed.
            generator: source of the seed if none is given.
            draws: "counter" (seeds), or "torch" (torch's global generator, in Hugging Face's order; rows depend on
                each other).
            eos_token_id: overrides the spec's end ids.
            pad_token_id: overrides the spec's pad id.
            stop_strings: end a row with the token that completes one of them.
            tokenizer: for ``stop_strings``; default the object's own.
            fixed: spans that stand in the generated part: ``{offset: ids}`` (negative: from the end), or a list, one
                per row.
            force_words_ids: phrases that must appear; each is placed where the model finds it likeliest.
            block_size: decode in blocks of this size (not for block-causal models, whose blocks are trained).
            context_window: see only so many tokens before the open block (an approximation).
            logits_hook: ``hook(pass, ids, logits, positions) -> logits``.
            tokens_hook: ``hook(pass, ids, noisy) -> ids``.
            ar: AR model for policy "apd_lossy".
            streamer: transformers' ``TextDiffusionStreamer`` or any streamer; one row only.
            return_dict_in_generate: return :class:`~specdiff.diffusion.output.DiffusionOutput`.
            output_trajectory: keep the canvas of every pass.
            token_type_ids: accepted if all zero (BERT tokenizers give them).
            **options: options of the policy, e.g. ``threshold=0.9``, ``steps=64``.

        Returns:
            ``Long[B, P + new]``: prompts as given, then new tokens, padding after a row's end; or a
            ``DiffusionOutput``.

        Raises:
            InvalidInputError: arguments out of range or in contradiction; before any compute.
            NumericalError: the model's logits are not numbers.
        """
        if input_ids is None:
            raise InvalidInputError("generate needs input_ids")
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise UnsupportedError("token_type_ids other than 0 are not supported")
        denoiser = self._denoiser(block_size)
        spec = denoiser.spec
        prompt, lengths, _ = compact(input_ids, attention_mask)
        new = _new_tokens(max_new_tokens, max_length, input_ids.shape[1])
        self._check_prompt(spec, prompt, lengths, new)
        rows = len(prompt)
        words = self._words(spec, force_words_ids, new)
        canvas, first, limit = generation_canvas(spec, prompt, lengths, new, per_row(fixed, rows))
        settings, denoiser = choose(
            denoiser,
            policy=policy,
            options=options,
            cache=cache,
            ar=ar,
            cfg_scale=cfg_scale,
            draws=draws,
            generator=generator,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            do_sample=do_sample,
        )
        if context_window is not None and context_window < 1:
            raise InvalidInputError(f"context_window must be at least 1, not {context_window}; None sees everything")
        settings.window = context_window
        settings.logits_hook, settings.tokens_hook = logits_hook, tokens_hook
        eos = spec.eos_ids if eos_token_id is None else _ids(eos_token_id)
        settings.ending = Ending(
            eos=torch.tensor(eos, device=input_ids.device) if eos else None,
            strings=_strings(stop_strings),
            tokenizer=tokenizer or self.tokenizer,
        )
        trajectory = None
        if output_trajectory:
            trajectory = Trajectory(first.cpu(), new, spec.mask_id or 0)
            settings.watch.append(trajectory)
        if streamer is not None:
            if rows != 1:
                raise InvalidInputError(f"a streamer takes one row, not {rows}")
            settings.stream = Stream(streamer, settings.policy.sticky)
        if settings.draws is not None and seed is None:
            seed = 0  # the counter noise is not read, and torch's generator must not move
        noise = make_noise(rows, seed, generator, input_ids.device)
        state = RowState.build(canvas, noise, spec, first, limit, words=[list(words) for _ in range(rows)])
        check_words(state, spec)
        begin = time.perf_counter()
        try:
            if streamer is not None:
                streamer.put(input_ids.cpu())
            finished = Decoder(denoiser, state, settings).run()
        finally:
            # whoever reads the stream must not wait for ever, errors included
            if streamer is not None:
                streamer.end()
        seconds = time.perf_counter() - begin
        pad = spec.pad if pad_token_id is None else pad_token_id
        out = collect(input_ids, finished, pad)
        notes = notes_of(settings) + self._lost_words(finished, words, rows)
        if not return_dict_in_generate:
            assert out.sequences is not None
            return out.sequences
        assert out.stats is not None
        out.stats.seconds = seconds
        out.stats.notes = notes
        out.trajectory = None if trajectory is None else tuple(trajectory.passes)
        return out

    @torch.no_grad()
    def score(
        self,
        ids: Tensor,
        prompt_length: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        *,
        samples: int = 128,
        batch_size: int = 16,
        seed: int | Sequence[int] | None = None,
    ) -> ElboScore:
        """Monte-Carlo lower bound of log p(answer | prompt), see :mod:`specdiff.diffusion.elbo`."""
        flat, lengths, _ = compact(ids, attention_mask)
        first = torch.as_tensor(prompt_length, device=ids.device).expand(len(ids)).clone()
        if attention_mask is not None and attention_mask.shape[1] and not bool(attention_mask[:, 0].all()):
            first = first - (ids.shape[1] - lengths)  # columns of left padding count in prompt_length
        noise = make_noise(len(ids), seed, None, ids.device)
        return monte_carlo_elbo(self.denoiser, flat, lengths, first, samples, batch_size, noise)

    def drafter(self, **kwargs: Any) -> Any:
        """A drafter for :class:`specdiff.SpecDiff` made of this model (its own key/value cache, shared parameters).

        Args:
            **kwargs: options of :class:`specdiff.drafters.block_lm.BlockLMDrafter` (``block_size``, ``mode``,
                ``policy``, ...).
        """
        from specdiff.drafters.block_lm import BlockLMDrafter  # the floor above: only when asked for

        return BlockLMDrafter(self, **kwargs)

    def _denoiser(self, block_size: int | None) -> DenoiserLike:
        if block_size is None or block_size == self.spec.block_size:
            return self.denoiser
        if self.spec.attention == "block_causal" or self.spec.commit == "encoder":
            raise UnsupportedError(
                f"{self.spec.name}: block_size {self.spec.block_size} is what the model was trained with; "
                f"{block_size} would change its attention"
            )
        return denoiser_for(self.model, self.spec.replace(block_size=block_size), self.adapter)

    def _check_prompt(self, spec: DLMSpec, prompt: Tensor, lengths: Tensor, new: int) -> None:
        vocab = self.denoiser.vocab_size
        if prompt.numel() and not (int(prompt.min()) >= 0 and int(prompt.max()) < vocab):
            raise InvalidInputError(f"input_ids hold an id outside the vocabulary of {vocab}")
        if bool((lengths < 1).any()) and spec.shift == 1:
            raise InvalidInputError(f"{spec.name}: an empty prompt has no token to predict the first one from")
        longest = int(lengths.max()) + new if len(lengths) else 0
        if spec.max_length is not None and longest > spec.max_length:
            log.warning("%s was made for %d tokens; %d were asked for", spec.name, spec.max_length, longest)

    def _words(self, spec: DLMSpec, words: Sequence[Sequence[int]] | None, new: int) -> list[Tensor]:
        if not words:
            return []
        if spec.corruption != "mask":
            raise UnsupportedError(f"{spec.name}: forced words need a mask token; use fixed= spans")
        room = new if spec.block_size is None else min(new, spec.block_size)
        for phrase in words:
            if not 0 < len(phrase) <= room:
                raise InvalidInputError(f"a forced phrase of {len(phrase)} tokens does not fit into a block of {room}")
            if not all(0 <= token < self.denoiser.vocab_size for token in phrase):
                raise InvalidInputError(
                    f"force_words_ids hold an id outside the vocabulary of {self.denoiser.vocab_size}"
                )
        total = sum(len(p) for p in words)
        if total > new:
            raise InvalidInputError(f"forced phrases of {total} tokens do not fit into {new} new tokens")
        return [torch.tensor(list(p), device=self.device) for p in words]

    def _lost_words(self, finished: Finished, words: list[Tensor], rows: int) -> list[str]:
        """Notes on rows that a stop string or a fixed end token ended before a forced phrase."""
        if not words:
            return []
        texts = []
        for row in range(rows):
            end, i = finished.row(row)
            texts.append(end.canvas.ids[i, int(end.first[i]) : finished.stop[row]])
        notes = [
            f"row {row} ended ({finished.reason[row]}) before its forced words" for row in missing_words(texts, words)
        ]
        for note in notes:
            log.warning("%s: %s", self.spec.name, note)
        return notes


def _new_tokens(max_new_tokens: int | None, max_length: int | None, prompt: int) -> int:
    if max_new_tokens is None:
        max_new_tokens = 128 if max_length is None else max_length - prompt
    if max_new_tokens < 0:
        raise InvalidInputError(f"max_new_tokens must not be negative: {max_new_tokens}")
    return max_new_tokens


def _ids(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)
