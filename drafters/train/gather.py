"""A plain one-layer DFlash drafter by least squares: no gradient step, a minute of work.

The z-lab block has no path from the last known state to its masked slots but attention. So attention is *built* to be
that path: every head looks at one fixed distance. With D distances, the head (g, d) of slot position P returns group g
of what stands at position P - d: the anchor's embedding for the slot d after the anchor, and the context one position
before the anchor for the slot d - 1 after it. Then the layer's output map is a linear regression, and the MLP and the
norms of the target's last layer follow, which they suit because what is regressed on is the target's state before it.

    keys      k_norm turns any key of positive content into the same vector; rotary positions are all that is left
    queries   the mask's own embedding, turned by -d: the score peaks at distance d, 8 s^2 high
    values    the identity: context lives in some channels of the width, the block's embeddings in the others
    fc        the regression of the state on the taps, in its principal directions; one large constant channel keeps the
              norm after it from bending what is linear
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.layers import rms_norm
from specdiff.drafters.train.features import Features
from specdiff.drafters.train.initialise import config_for, decoder_layers
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)

HEAD = 64
"""Width of a head."""
THETA = 8.0
"""Rotary base: high frequencies only, so that neighbouring distances are told apart."""
SHARPNESS = 10.0
"""Squared weight of the query and key norms; a neighbour of the right distance scores 0.12 * 8 * this less."""


@dataclass(frozen=True)
class GatherConfig:
    """What to build.

    Attributes:
        block_size: K.
        mask_token_id: fills the undecided slots; an id that the target never writes.
        context: channels for the context; the rest of the width is for the block's embeddings.
        ridge: relative to the mean eigenvalue.
        weights: of the slots in the regression; later slots are reached less often.
        dtype: that the weights are rounded to, each before what follows is fitted to it.
    """

    block_size: int = 4
    mask_token_id: int = 0
    context: int = 320
    ridge: float = 1e-3
    weights: tuple[float, ...] = (1.0, 0.5, 0.25, 0.12)
    dtype: torch.dtype = torch.bfloat16


@torch.no_grad()
def fit(target: Any, items: Sequence[Features], taps: Sequence[int], config: GatherConfig) -> DFlashDrafter:
    """A drafter bound to ``target``.

    Args:
        target: a Hugging Face causal LM of the Llama kind; only read.
        items: documents with features; ``taps`` must hold the layer before the last.
        taps: of the features.
        config: see there.

    Raises:
        InvalidInputError: widths that do not fit, or no document is long enough.
    """
    text = target.config.get_text_config()
    hidden = text.hidden_size
    if hidden % HEAD or not 0 < config.context < hidden:
        raise InvalidInputError(
            f"hidden_size {hidden} must be a multiple of {HEAD}, context {config.context} within it"
        )
    if text.num_hidden_layers - 2 not in taps:
        raise InvalidInputError(f"taps {tuple(taps)} must hold {text.num_hidden_layers - 2}, the last layer's input")
    shape: DFlashConfig = config_for(
        target, num_layers=1, target_layer_ids=tuple(taps), block_size=config.block_size, rope_theta=THETA,
        mask_token_id=config.mask_token_id, head_dim=HEAD, num_kv_heads=hidden // HEAD,
        num_heads=hidden // HEAD * config.block_size,
    )  # fmt: skip
    model = DFlashModel(shape)
    last: Any = decoder_layers(target)[-1]
    layer = model.stack[0]
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    model.norm.weight.copy_(target.model.norm.weight)
    embedding = target.get_input_embeddings().weight.detach().float()
    data = [d for item in items if (d := _document(target, last, item, taps, config.block_size)) is not None]
    if not data:
        raise InvalidInputError("no document is long enough to fit a drafter on")
    known = _known(embedding, data)
    mine = _channels(known, config.context)
    _fit_context(model, known, mine, config)
    _build_attention(model, embedding, data, mine, config)
    explained = _fit_output(model, embedding, data, config)
    logger.info("least squares on %d anchors, energy explained by slot: %s", sum(d.size for d in data), explained)
    model.to(config.dtype).float()
    return DFlashDrafter(model).eval().bind(target)


@dataclass(frozen=True, eq=False)
class _Document:
    """One document: N anchors at positions ``start ..``; taps and ids of all positions, states to regress on."""

    ids: Tensor
    taps: Tensor
    states: Tensor
    start: int
    size: int

    def before(self, distance: int) -> slice:
        """The positions ``distance`` before the anchors."""
        return slice(self.start - distance, self.start - distance + self.size)


def _document(target: Any, last: Any, item: Features, taps: Sequence[int], block: int) -> _Document | None:
    start = max(item.document.prompt_length, block + 1)
    size = len(item.document) - block - start
    if size < 1:
        return None
    states = torch.from_numpy(np.array(item.taps)).float()
    depth = target.config.get_text_config().num_hidden_layers
    entering = states[:, list(taps).index(depth - 2)][None]
    places = torch.arange(entering.shape[1])[None]
    length = entering.shape[1]
    hidden = torch.full((length, length), float("-inf")).triu(1)[None, None]
    mixed = last.self_attn(
        hidden_states=last.input_layernorm(entering),
        position_embeddings=target.model.rotary_emb(entering, places),
        attention_mask=hidden,
    )[0]
    ids = torch.from_numpy(item.document.ids)
    return _Document(ids, states.flatten(1), (entering + mixed)[0], start, size)


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    penalty = ridge * gram.diagonal().mean()
    return torch.linalg.solve(gram.double() + penalty * torch.eye(len(gram)), cross.double()).float()


def _normed(embedding: Tensor, ids: Tensor) -> Tensor:
    return rms_norm(embedding[ids], 1e-5)


@dataclass(frozen=True, eq=False)
class _Known:
    """Products of what is known of the first slot (scaled taps | the anchor's embedding | 1) and of what it should be.

    Attributes:
        scale: root mean square of each tapped channel.
        gram: of what is known with itself.
        cross: with the state.
        count: anchors.
    """

    scale: Tensor
    gram: Tensor
    cross: Tensor
    count: int


def _known(embedding: Tensor, data: Sequence[_Document]) -> _Known:
    total = sum((d.taps.square().sum(0) for d in data), torch.zeros(()))
    scale = (total / sum(len(d.taps) for d in data)).sqrt().clamp(min=1e-3)
    gram, cross = torch.zeros(()), torch.zeros(())
    for d in data:
        anchor = _normed(embedding, d.ids[d.before(0)])
        x = torch.cat([d.taps[d.before(1)] / scale, anchor, torch.ones(d.size, 1)], 1)
        gram, cross = gram + x.T @ x, cross + x.T @ d.states[d.before(0)]
    return _Known(scale, gram, cross, sum(d.size for d in data))


def _channels(known: _Known, context: int) -> Tensor:
    """``Bool[H]`` the channels of the width that the block's embeddings keep: those that the regression leans on."""
    taps, width = len(known.scale), known.cross.shape[1]
    weights = _solve(known.gram, known.cross, 1e-3)[taps : taps + width]
    spread = (known.gram.diagonal()[taps : taps + width] / known.count).sqrt()
    keep = torch.zeros(width, dtype=torch.bool)
    keep[(weights.norm(dim=1) * spread).topk(width - context).indices] = True
    return keep


def _fit_context(model: DFlashModel, known: _Known, mine: Tensor, config: GatherConfig) -> None:
    """``fc`` and its norm: the principal directions of what the taps say about the state, and a constant."""
    scale, size = known.scale, len(known.scale)
    used = torch.cat([torch.ones(size, dtype=torch.bool), mine, torch.ones(1, dtype=torch.bool)])
    weights = _solve(known.gram[used][:, used], known.cross[used], config.ridge)[:size]
    gram = known.gram[:size, :size]
    energy, basis = torch.linalg.eigh(weights.T @ (gram / known.count) @ weights)
    rank = config.context - 1
    basis, energy = basis[:, -rank:], energy[-rank:].clamp(min=1e-6)
    constant = _solve(gram, known.gram[:size, -1:], 1e-6)
    rows = torch.zeros_like(model.fc.weight)
    places = (~mine).nonzero()[:, 0]
    spread = energy.sqrt()
    # the constant outweighs the rest twenty times, so that the norm divides by nearly the same number everywhere
    rows[places[1:]] = (weights @ (basis / spread)).T / scale / (20 * rank**0.5)
    rows[places[0]] = constant[:, 0] / scale
    model.fc.weight.copy_((10 * rows).to(config.dtype))
    gain = torch.zeros(len(mine))
    norm = model.config.hidden_size**-0.5
    gain[places[0]], gain[places[1:]] = norm, norm * 20 * rank**0.5
    model.hidden_norm.weight.copy_(gain.to(config.dtype))


def _build_attention(
    model: DFlashModel, embedding: Tensor, data: Sequence[_Document], mine: Tensor, config: GatherConfig
) -> None:
    layer, width = model.stack[0], model.config.hidden_size
    layer.input_layernorm.weight.copy_(mine.float())
    ids = torch.cat([d.ids for d in data])
    mask = _normed(embedding, torch.tensor([config.mask_token_id])) * mine
    known = _normed(embedding, ids) * mine
    rows = torch.cat([known, mask * len(known) ** 0.5 / 3])
    wanted = torch.cat([torch.ones(len(known), 1), torch.full((1, 1), len(known) ** 0.5 / 3)])
    positive = _solve(rows.T @ rows, rows.T @ wanted, 1e-6)[:, 0] * mine
    share = float((known @ positive > 0).float().mean())
    logger.info("keys of the block are positive for %.1f%% of the tokens", 100 * share)
    positive[(~mine).nonzero()[0, 0]] = 1.0
    half = HEAD // 2
    key = torch.cat([torch.ones(half), torch.zeros(half)])
    angle = THETA ** (-torch.arange(half) / half)
    groups = width // HEAD
    layer.self_attn.k_proj.weight.copy_(torch.outer(key, positive).repeat(groups, 1).to(config.dtype))
    layer.self_attn.v_proj.weight.copy_(torch.eye(width))
    ask = mask[0] / mask.square().sum()
    queries = []
    for distance in range(1, config.block_size + 1):
        query = torch.cat([(angle * distance).cos(), -(angle * distance).sin()])
        queries.append(torch.outer(query, ask))
    layer.self_attn.q_proj.weight.copy_(torch.cat(queries).repeat(groups, 1).to(config.dtype))
    layer.self_attn.q_norm.weight.fill_(SHARPNESS**0.5)
    layer.self_attn.k_norm.weight.fill_(SHARPNESS**0.5)


def _fit_output(model: DFlashModel, embedding: Tensor, data: Sequence[_Document], config: GatherConfig) -> list[float]:
    """The output map; returns the share of the states' energy that each slot explains."""
    layer, block = model.stack[0], config.block_size
    mask = embedding[config.mask_token_id]
    blank = layer.input_layernorm(mask)
    gram, cross = torch.zeros(()), torch.zeros(())
    seen: list[tuple[int, Tensor, Tensor]] = []
    for d in data:
        context = model.hidden_norm(model.fc(d.taps))
        anchor = layer.input_layernorm(embedding[d.ids[d.before(0)]])
        for slot in range(1, block + 1):
            found = [
                blank.expand(d.size, -1) if distance < slot else anchor if distance == slot
                else context[d.before(distance - slot)]
                for distance in range(1, block + 1)
            ]  # fmt: skip
            x, y = torch.cat(found, 1), d.states[d.before(1 - slot)] - mask
            weight = config.weights[min(slot, len(config.weights)) - 1]
            gram, cross = gram + weight * (x.T @ x), cross + weight * (x.T @ y)
            if len(seen) < 4 * block:
                seen.append((slot, x, y))
    output = _solve(gram, cross, config.ridge)
    width, groups = model.config.hidden_size, model.config.hidden_size // HEAD
    by_head = output.view(block, groups, HEAD, width).transpose(0, 1).reshape(-1, width)
    layer.self_attn.o_proj.weight.copy_(by_head.T.to(config.dtype))
    shares = []
    for slot in range(1, block + 1):
        parts = [(x, y) for s, x, y in seen if s == slot]
        left = sum(float((y - x @ output).square().sum()) for x, y in parts)
        whole = sum(float((y - y.mean(0)).square().sum()) for _, y in parts)
        shares.append(round(1 - left / whole, 3))
    return shares
