"""Infilling and what is made of it: refine, edit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdiff.diffusion.caches import BlockCache
from specdiff.diffusion.canvas import Canvas
from specdiff.diffusion.denoiser import DenoiserLike
from specdiff.diffusion.loop import Decoder, LogitsHook, TokensHook
from specdiff.diffusion.output import DiffusionOutput, stats_of
from specdiff.diffusion.pieces import filled, gapped
from specdiff.diffusion.policies import Policy
from specdiff.diffusion.request import compact, infill_canvas, make_noise
from specdiff.diffusion.settings import choose, notes_of
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.state import RowState
from specdiff.diffusion.streaming import Stream
from specdiff.errors import InvalidInputError, UnsupportedError


class Infilling:
    """The part of :class:`specdiff.DiffusionLM` that writes inside a text."""

    spec: DLMSpec
    denoiser: DenoiserLike
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """Where tokens are expected."""
        return self.denoiser.device

    @torch.no_grad()
    def infill(
        self,
        ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        stretch: bool = False,
        policy: str | Policy | None = None,
        cache: str | BlockCache | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool | None = None,
        cfg_scale: float = 0.0,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        logits_hook: LogitsHook | None = None,
        tokens_hook: TokensHook | None = None,
        streamer: Any = None,
        return_dict_in_generate: bool = False,
        **options: Any,
    ) -> Tensor | DiffusionOutput:
        """Write the positions of ``mask`` anew, seeing what stands on both sides.

        Models with causal blocks see a suffix only inside the open block. The span and everything after it must fit
        into one
        block, or ``stretch=True`` opens one canvas from the span's block to the end (larger than the model was
        trained on).

        Args:
            ids: ``Long[B, N]``.
            mask: ``Bool[B, N]`` positions to write; all others stay bit-equal.
            attention_mask: ``[B, N]``, 1 where real.
            stretch: allow a larger canvas.
            streamer: one row only; gets the text before the first gap as its prompt, then all that follows.
            **options: as in :meth:`generate`.

        Returns:
            ``Long[B, N]``, or a ``DiffusionOutput`` whose ``sequences`` are that.
        """
        if mask.shape != ids.shape:
            raise InvalidInputError(f"mask {tuple(mask.shape)} must have the shape of ids {tuple(ids.shape)}")
        mask = mask.to(torch.bool)
        if attention_mask is not None:
            mask = mask & attention_mask.to(torch.bool)
        spec = self.spec
        flat, lengths, column = compact(ids, attention_mask)
        flat_mask = mask.gather(1, column)
        canvas, first, limit = infill_canvas(spec, flat, lengths, flat_mask)
        stretched = self._stretched(canvas, first, stretch)
        settings, denoiser = choose(
            self.denoiser,
            policy=policy,
            options=options,
            cache=cache,
            cfg_scale=cfg_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            do_sample=do_sample,
        )
        settings.logits_hook, settings.tokens_hook = logits_hook, tokens_hook
        if streamer is not None:
            if len(ids) != 1:
                raise InvalidInputError(f"a streamer takes one row, not {len(ids)}")
            settings.stream = Stream(streamer, settings.policy.sticky)
        state = RowState.build(canvas, make_noise(len(ids), seed, generator, ids.device), spec, first, limit, stretched)
        begin = time.perf_counter()
        try:
            if streamer is not None:
                # as in generate, what comes first is what is not written: the text before the first gap
                streamer.put(flat[:, : int(first[0])].cpu())
            finished = Decoder(denoiser, state, settings).run()
        finally:
            if streamer is not None:
                streamer.end()
        out = ids.clone()
        confidence = torch.zeros(ids.shape)
        for row in range(len(ids)):
            end, i = finished.row(row)
            n = int(lengths[row])
            where = column[row, :n]
            out[row, where] = torch.where(flat_mask[row, :n], end.canvas.ids[i, :n], flat[row, :n])
            confidence[row, where.cpu()] = end.canvas.confidence[i, :n].float().cpu()
        if not return_dict_in_generate:
            return out
        stats = stats_of(finished, [int(x) for x in flat_mask.sum(-1).tolist()])
        stats.seconds = time.perf_counter() - begin
        stats.notes = notes_of(settings)
        return DiffusionOutput(sequences=out, confidence=confidence, stats=stats)

    def refine(
        self, ids: Tensor, spans: Sequence[tuple[int, int]] | Sequence[Sequence[tuple[int, int]]], **kwargs: Any
    ) -> Any:
        """Write token spans ``[begin, end)`` of a text (e.g. from an AR model) anew; everything else stays bit-equal.

        Args:
            ids: ``Long[B, N]``.
            spans: pairs for all rows, or one list of pairs per row.
            **kwargs: as in :meth:`infill`.
        """
        mask = torch.zeros_like(ids, dtype=torch.bool)
        flat = all(len(pair) == 2 and all(isinstance(edge, int) for edge in pair) for pair in spans)
        rows: list[Any] = [spans] * len(ids) if flat else list(spans)
        if len(rows) != len(ids):
            raise InvalidInputError(f"spans has {len(rows)} entries for {len(ids)} rows")
        for row, pairs in enumerate(rows):
            for begin, end in pairs:
                if not 0 <= begin < end <= ids.shape[1]:
                    raise InvalidInputError(f"span ({begin}, {end}) lies outside the {ids.shape[1]} tokens")
                mask[row, begin:end] = True
        return self.infill(ids, mask, **kwargs)

    def edit(self, text: str, spans: Sequence[tuple[int, int] | tuple[int, int, int]], **kwargs: Any) -> str:
        """Replace character spans of ``text``.

        Args:
            text: the text.
            spans: ``(begin, end)`` in characters, or ``(begin, end, n)`` to write ``n`` tokens there instead of as
                many as stood.
            **kwargs: as in :meth:`infill`.

        Returns:
            the new text; what lies outside the spans is unchanged.
        """
        if self.tokenizer is None:
            raise InvalidInputError("edit needs a tokenizer: DiffusionLM(model, ..., tokenizer=tok)")
        if kwargs.get("return_dict_in_generate"):
            raise InvalidInputError("edit returns text: leave out return_dict_in_generate, or use infill or refine")
        parts: list[str | int] = []
        at = 0
        for span in sorted(spans):
            begin, end = span[0], span[1]
            if not at <= begin <= end <= len(text):
                raise InvalidInputError(f"span ({begin}, {end}) overlaps another or lies outside the text")
            count = span[2] if len(span) == 3 else len(self._encoded(text[begin:end]))
            if count < 0:
                raise InvalidInputError(f"span ({begin}, {end}): the number of tokens must not be negative: {count}")
            parts += [text[at:begin], count]
            at = end
        parts.append(text[at:])
        filler = self.spec.mask_id if self.spec.mask_id is not None else self.spec.pad
        ids, mask, places = gapped(self.tokenizer, parts, filler)
        out = self.infill(torch.tensor([ids], device=self.device), torch.tensor([mask], device=self.device), **kwargs)
        assert isinstance(out, Tensor)
        return filled(self.tokenizer, parts, out[0].tolist(), places)

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _stretched(self, canvas: Canvas, first: Tensor, allow: bool) -> Tensor:
        """Rows whose canvas must be stretched to see their suffix."""
        spec = self.spec
        if spec.attention == "full":
            return torch.zeros_like(canvas.done)
        if spec.attention == "causal":
            raise UnsupportedError(f"{spec.name}: causal attention cannot see a suffix, so it cannot infill")
        size = spec.block_size or 1
        begin = first if spec.alignment == "prompt" else first // size * size
        too_long = canvas.noisy.any(-1) & (canvas.length - begin > size)
        if bool(too_long.any()) and not allow:
            row = int(too_long.nonzero()[0])
            raise UnsupportedError(
                f"{spec.name}: row {row} has text after the span that a block of {size} does not reach; put span and "
                f"suffix into one block, or pass stretch=True (diffuse: --stretch) to open one canvas of "
                f"{int(canvas.length[row] - begin[row])} tokens"
            )
        return too_long
