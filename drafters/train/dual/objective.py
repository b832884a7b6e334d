"""The loss of a dual-mode run.

The frozen model reads the clean rows once; the adapted one reads the noisy blocks on top of the same keys and values
and learns the model's own next-token laws from what little it sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specdiff.diffusion.denoiser import cache_argument
from specdiff.diffusion.dual import DualAdapter
from specdiff.diffusion.visibility import additive_mask
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.noise import NoisyBatch
from specdiff.errors import UnsupportedError


def clean_visibility(batch: NoisyBatch) -> Tensor:
    """``Bool[R, T, T]``: clean tokens are causal within their own document."""
    own = batch.document[:, :, None] == batch.document[:, None, :]
    return own & torch.ones(own.shape[1:], dtype=torch.bool, device=own.device).tril()


def noisy_visibility(batch: NoisyBatch) -> Tensor:
    """``Bool[R, G * S, T + G * S]``: a block sees the clean tokens before it in its document, and itself."""
    rows, blocks, size = batch.masked.shape
    column = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    own = batch.document[:, None, :] == batch.document.gather(1, batch.anchors)[:, :, None]
    before = own & (column <= batch.anchors[:, :, None])
    clean = before[:, :, None, :].expand(rows, blocks, size, -1).flatten(1, 2)
    among = torch.zeros(rows, blocks, size, blocks, size, dtype=torch.bool, device=clean.device)
    same = torch.arange(blocks, device=clean.device)
    among[:, same, :, same, :] = batch.open.transpose(0, 1)
    return torch.cat([clean, among.flatten(3, 4).flatten(1, 2)], -1)


def trained(batch: NoisyBatch) -> Tensor:
    """``Bool[R, G, S - 1]``: masked positions but the first of a block, which the causal model itself predicts."""
    return batch.masked[..., 1:]


def weights(batch: NoisyBatch, config: DualConfig) -> Tensor:
    """``float32[R, G, S - 1]`` of the trained positions, 0 elsewhere."""
    slot = torch.arange(batch.masked.shape[-1] - 1, device=batch.masked.device)
    decay = torch.exp(-slot / config.gamma)
    other = 1 / batch.rate.clamp(min=1e-3) if config.inverse_rate else torch.ones_like(batch.rate)
    return torch.where(batch.drafting[..., None], decay, other[..., None]) * trained(batch)


class DualObjective(nn.Module):
    """The adapter with its loss as one module, so that data-parallel wrappers see a single forward call.

    Args:
        adapter: what is trained; its base is read only.
        config: noise and loss.
    """

    def __init__(self, adapter: DualAdapter, config: DualConfig) -> None:
        super().__init__()
        self.adapter = adapter
        self.config = config
        name = cache_argument(adapter.base)
        if name is None:
            raise UnsupportedError(f"{type(adapter.base).__name__} takes no key/value cache: it has no dual mode")
        self.cache_name = name

    @torch.no_grad()
    def clean(self, batch: NoisyBatch) -> tuple[Tensor, DynamicCache]:
        """Logits ``[n, V]`` of the frozen model for the trained positions, and its keys and values of all rows."""
        cache = DynamicCache()
        base = self.adapter.base
        dtype = next(base.parameters()).dtype
        first = int(batch.anchors.min()) + 1
        out = base(
            input_ids=batch.ids,
            attention_mask=additive_mask(clean_visibility(batch), dtype),
            position_ids=batch.place,
            use_cache=True,
            logits_to_keep=batch.ids.shape[1] - first,
            **{self.cache_name: cache},
        )
        row, block, slot = trained(batch).nonzero(as_tuple=True)
        # position anchor + 2 + slot is predicted one column before it
        return out.logits[row, batch.anchors[row, block] + 1 + slot - first], cache

    def noisy(self, batch: NoisyBatch, cache: DynamicCache) -> Tensor:
        """Logits ``[n, V]`` of the adapted model for the trained positions."""
        rows, blocks, size = batch.masked.shape
        hidden = batch.masked | ~batch.present
        ids = torch.where(hidden, self.adapter.mask_id, batch.tokens)
        place = batch.place.gather(1, batch.anchors)[..., None] + 1 + torch.arange(size, device=ids.device)
        dtype = next(self.adapter.base.parameters()).dtype
        with self.adapter.rows(torch.ones(rows, blocks * size, dtype=torch.bool, device=ids.device)):
            out = self.adapter.model(
                input_ids=ids.flatten(1),
                attention_mask=additive_mask(noisy_visibility(batch), dtype),
                position_ids=place.flatten(1),
                use_cache=True,
                **{self.cache_name: cache},
            )
        logits: Tensor = out.logits
        return logits.view(rows, blocks, size, -1)[:, :, :-1][trained(batch)]

    def forward(self, batch: NoisyBatch) -> tuple[Tensor, dict[str, Any]]:
        """The mean loss over the positions that could be masked, and measurements (no gradient)."""
        target, cache = self.clean(batch)
        logits = self.noisy(batch, cache).float()
        law = torch.log_softmax(target.float(), -1)
        own = torch.log_softmax(logits, -1)
        kl = (law.exp() * (law - own)).sum(-1)
        tokens = batch.tokens[..., 1:][trained(batch)]
        ce = -own.gather(1, tokens[:, None])[:, 0]
        weight = weights(batch, self.config)[trained(batch)]
        possible = batch.present[..., 1:].sum().clamp(min=1)
        loss = (weight * (kl + self.config.hard * ce)).sum() / possible
        best = own.detach().argmax(-1)
        if self.config.confidence:
            loss = loss + self.config.confidence * confident_entropy(own, best == tokens)
        return loss, measurements(batch, best == law.argmax(-1), kl.detach(), loss.detach())


def confident_entropy(log_law: Tensor, right: Tensor) -> Tensor:
    """Mean entropy of the laws ``[n, V]`` whose top token is right: CAP sharpens what is already true."""
    if not bool(right.any()):
        return log_law.sum() * 0
    chosen = log_law[right]
    return -(chosen.exp() * chosen).sum(-1).mean()


def measurements(batch: NoisyBatch, agrees: Tensor, kl: Tensor, loss: Tensor) -> dict[str, Any]:
    """Sums by trained slot: agreement with the causal model's top token in drafting blocks, and KL in both kinds.

    Returns:
        ``loss``; ``hits``, ``count`` and ``kl`` (``[S - 1]``, drafting blocks); ``through`` (``[S - 1]``, drafting
        blocks right in slots 1..k); ``other_kl`` and ``other_count`` (partly masked blocks); ``blocks``.
    """
    where = trained(batch)
    draft = batch.drafting[..., None]
    hit = torch.zeros_like(where).masked_scatter(where, agrees)
    each = torch.zeros(where.shape, device=kl.device).masked_scatter(where, kl)
    right = (hit & draft).long().cumprod(-1)
    return {
        "loss": loss,
        "hits": (hit & draft).sum((0, 1)),
        "count": (where & draft).sum((0, 1)),
        "kl": (each * draft).sum((0, 1)),
        "through": right.sum((0, 1)),
        "blocks": batch.drafting.sum(),
        "other_kl": (each * ~draft).sum(),
        "other_count": (where & ~draft).sum(),
    }
