"""Denoisers whose clean text goes through an encoder and whose canvas goes through a decoder that reads the
encoder's cache.

DiffusionGemma is the native case. The contract for others (E2D2: a clean encoder and a small denoiser) is
:class:`EncoderDecoder`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specdiff.diffusion.canvas import pack
from specdiff.diffusion.denoiser import PassInput
from specdiff.diffusion.scatter import ScatterCache
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.visibility import additive_mask
from specdiff.errors import UnsupportedError


class EncoderDecoder(Protocol):
    """What a model with a clean encoder and a canvas decoder offers.

    ``layers`` and ``sliding`` describe the cache: one entry per layer, the sliding window or None.
    """

    vocab_size: int
    layers: int
    sliding: list[int | None]

    def encode(self, ids: Tensor, positions: Tensor, masks: dict[int | None, Tensor], cache: ScatterCache) -> None:
        """Write keys and values of clean ``ids``: ``Long[A, T]``; ``masks`` by window: additive ``[A, 1, T, S]``."""
        ...

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: dict[int | None, Tensor],
        cache: ScatterCache,
        conditioning: Tensor | None,
        conditioned: Tensor | None,
    ) -> Tensor:
        """``[A, T, V]`` logits of the canvas; ``masks`` cover the cache's view, then the canvas. Writes nothing."""
        ...


class DiffusionGemma:
    """transformers' ``DiffusionGemmaForBlockDiffusion`` behind the contract."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.layers = int(config.num_hidden_layers)
        self.kinds = list(config.layer_types)
        self.sliding = [config.sliding_window if k == "sliding_attention" else None for k in self.kinds]

    def _named(self, masks: dict[int | None, Tensor]) -> dict[str, Tensor]:
        return {kind: masks[window] for kind, window in zip(self.kinds, self.sliding, strict=True)}

    def encode(self, ids: Tensor, positions: Tensor, masks: dict[int | None, Tensor], cache: ScatterCache) -> None:
        """Run the causal encoder."""
        self.model.model.encoder(input_ids=ids, attention_mask=self._named(masks), position_ids=positions, cache=cache)

    def decode(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: dict[int | None, Tensor],
        cache: ScatterCache,
        conditioning: Tensor | None,
        conditioned: Tensor | None,
    ) -> Tensor:
        """Run the canvas decoder; the first step's self-conditioning signal is zero, and goes through its module."""
        dtype = self.model.model.decoder.embed_tokens.weight.dtype
        return self.model(
            decoder_input_ids=ids,
            decoder_attention_mask=self._named(masks),
            decoder_position_ids=positions,
            cache=cache,
            self_conditioning_logits=None if conditioning is None else conditioning.to(dtype),
            self_conditioning_mask=conditioned,
        ).logits


class EncoderDenoiser:
    """An :class:`EncoderDecoder` as a denoiser.

    A pass encodes what is clean and not encoded yet (prompts, blocks that have just closed), then decodes the open
    canvases.
    On sliding layers every canvas position sees the last ``window - 1`` clean tokens and the whole canvas.

    Args:
        model: a DiffusionGemma model, or an object with the contract.
        spec: its description (``commit="encoder"``).
    """

    supports_cache = True

    def __init__(self, model: Any, spec: DLMSpec) -> None:
        self.model = model
        self.spec = spec
        if type(model).__name__ == "DiffusionGemmaForBlockDiffusion":
            self.inner: EncoderDecoder = DiffusionGemma(model)
        elif all(hasattr(model, name) for name in ("encode", "decode", "layers", "sliding", "vocab_size")):
            self.inner = model
        else:
            raise UnsupportedError(
                f"{type(model).__name__} is not an encoder and decoder: it needs encode, decode, layers, sliding, "
                f"vocab_size "
                "(see specdiff.diffusion.encdec.EncoderDecoder)"
            )
        self.vocab_size = self.inner.vocab_size
        spec.check_vocab(self.vocab_size)

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter."""
        return next(self.model.parameters()).device

    @property
    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def new_cache(self, rows: int, capacity: int) -> ScatterCache:
        """An empty encoder cache."""
        return ScatterCache(self.inner.layers, capacity)

    def select(self, cache: ScatterCache, rows: Tensor) -> None:
        """Keep only ``rows``."""
        cache.select(rows)

    @torch.no_grad()
    def logits(self, batch: PassInput, cache: ScatterCache | None = None) -> Tensor:
        """float32 ``[A, W, V]`` predictions of the packed wanted positions."""
        if cache is None:
            raise UnsupportedError(f"{self.spec.name}: the decoder reads the encoder's cache; cache='block' is needed")
        clean = batch.visible & ~batch.open
        extent = int(clean.any(0).nonzero().max()) + 1 if bool(clean.any()) else 0
        if bool((batch.plan & clean).any()):
            self._encode(batch, clean, extent, cache)
        positions, valid = pack(batch.open & batch.visible)
        cache.aim(positions, valid, extent)
        cache_seen = torch.cat([clean.new_zeros(len(clean), 1), clean[:, :extent]], 1)
        slot = torch.arange(-1, extent, device=clean.device)
        start = torch.where(valid, positions, batch.ids.shape[1]).amin(-1)
        masks: dict[int | None, Tensor] = {}
        for window in set(self.inner.sliding):
            near = cache_seen if window is None else cache_seen & (slot > (start - window)[:, None])
            seen = torch.cat([near, valid], 1)[:, None, :].expand(-1, positions.shape[1], -1)
            masks[window] = additive_mask(seen, self._dtype)
        ids = batch.ids.gather(1, positions)
        want, want_ok = pack(batch.want)
        rank = ((batch.open & batch.visible).long().cumsum(-1) - 1).gather(1, want).clamp(min=0)
        conditioning = batch.conditioning
        if conditioning is not None:
            conditioning = _fit(conditioning, want.shape[1])
            if not torch.equal(want, positions):
                conditioning = _among_fixed(conditioning, rank, want_ok, ids)
        logits = self.inner.decode(ids, positions, masks, cache, conditioning, batch.conditioned).float()
        if torch.equal(want, positions):
            return logits
        return logits.gather(1, rank[..., None].expand(*rank.shape, logits.shape[-1]))

    def _encode(self, batch: PassInput, clean: Tensor, extent: int, cache: ScatterCache) -> None:
        positions, valid = pack(batch.plan & clean)
        cache.aim(positions, valid, extent)
        slot = torch.arange(-1, extent, device=positions.device)
        there = torch.cat([clean.new_zeros(len(clean), 1), clean[:, :extent]], 1)
        seen = there[:, None, :] & (slot[None, None, :] <= positions[:, :, None])
        masks: dict[int | None, Tensor] = {}
        for window in set(self.inner.sliding):
            near = seen if window is None else seen & (slot[None, None, :] > positions[:, :, None] - window)
            masks[window] = additive_mask(near, self._dtype)
        self.inner.encode(batch.ids.gather(1, positions), positions, masks, cache)


def _fit(conditioning: Tensor, width: int) -> Tensor:
    """``[A, width, V]``: a wider row has left, or a row has opened a wider canvas (and is not conditioned yet)."""
    missing = width - conditioning.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(conditioning, (0, 0, 0, missing))
    return conditioning[:, :width]


def _among_fixed(conditioning: Tensor, rank: Tensor, valid: Tensor, ids: Tensor) -> Tensor:
    """``[A, T, V]`` conditioning of a whole canvas from that of its open columns: fixed tokens are certain of
    themselves.

    Args:
        conditioning: ``[A, W, V]`` logits of the open columns.
        rank: ``Long[A, W]`` their places in the canvas.
        valid: ``Bool[A, W]``.
        ids: ``Long[A, T]`` the canvas.
    """
    sure = torch.full((*ids.shape, conditioning.shape[-1]), -1e4, dtype=conditioning.dtype, device=ids.device)
    sure.scatter_(-1, ids[..., None], 0.0)
    row, column = valid.nonzero(as_tuple=True)
    sure[row, rank[row, column]] = conditioning[row, column]
    return sure
