"""Starting weights from the target: its last layers, its norms, and least squares for the direct path."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashModel
from specdiff.drafters.layers import rms_norm
from specdiff.drafters.train.features import Features
from specdiff.errors import InvalidInputError, UnsupportedError

logger = logging.getLogger(__name__)


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """``round(linspace(1, L - 3, n))``; n = 1 gives L // 2."""
    if count == 1:
        return (layers // 2,)
    last = max(layers - 3, 1)
    return tuple(dict.fromkeys(round(1 + i * (last - 1) / (count - 1)) for i in range(count)))


def decoder_layers(target: Any) -> nn.ModuleList:
    """The target's decoder blocks.

    Raises:
        UnsupportedError: they are not at ``model.layers``.
    """
    for name in ("model", "transformer"):
        inner = getattr(target, name, None)
        for inner_name in ("layers", "h"):
            layers = getattr(getattr(inner, "language_model", inner), inner_name, None)
            if isinstance(layers, nn.ModuleList):
                return layers
    raise UnsupportedError(f"{type(target).__name__}: no decoder layers found to initialise the drafter from")


def config_for(target: Any, **options: Any) -> DFlashConfig:
    """Settings of a drafter whose layers have the shape of the target's own."""
    text = target.config.get_text_config()
    heads = text.num_attention_heads
    theta = getattr(text, "rope_theta", None) or (getattr(text, "rope_parameters", None) or {}).get(
        "rope_theta", 10000.0
    )
    values: dict[str, Any] = {
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "vocab_size": text.vocab_size,
        "num_target_layers": text.num_hidden_layers,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
    }
    return DFlashConfig(**(values | options))


def copy_layers(model: DFlashModel, target: Any, first: int) -> None:
    """Copy target layers ``first, first + 1, ...`` into the draft layers, and the norms around them.

    Where the tap ``first - 1`` (the state that enters layer ``first``) is read, ``fc`` starts by passing it on, so that
    the injected keys and values start as the target's own keys and values of that layer.

    Raises:
        UnsupportedError: shapes differ.
    """
    source: list[Any] = list(decoder_layers(target))
    for offset, layer in enumerate(model.layers):
        theirs = {name: p.detach().to(model.fc.weight.device) for name, p in source[first + offset].named_parameters()}
        for name, mine in layer.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in theirs:
                continue
            if name not in theirs or theirs[name].shape != mine.shape:
                raise UnsupportedError(f"target layer {first + offset} has no {name} of shape {tuple(mine.shape)}")
            mine.data.copy_(theirs[name].data)
    inner = getattr(target, "model", None)
    norm = getattr(inner, "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == model.norm.weight.shape:
        model.norm.weight.data.copy_(norm.weight.data)
    taps = model.config.target_layer_ids
    if first - 1 in taps:
        width, index = model.config.hidden_size, taps.index(first - 1)
        nn.init.normal_(model.fc.weight, std=0.02 / len(taps))
        model.fc.weight.data[:, index * width : (index + 1) * width] = torch.eye(width)
        shared = source[first].input_layernorm.weight.data.to(model.fc.weight.device)
        model.hidden_norm.weight.data.copy_(shared)
        for offset, layer in enumerate(model.stack[1:], 1):
            # Later layers read the same context: their keys and values take in the ratio of the two norms' weights. The
            # block itself enters through their own norm, so what is folded in here is undone there.
            theirs = source[first + offset].input_layernorm.weight.data.to(shared)
            ratio = theirs / torch.where(shared.abs() < 1e-3, 1.0, shared)
            ratio = torch.where(shared.abs() < 1e-3, torch.ones_like(ratio), ratio)
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.data.mul_(ratio)
            layer.self_attn.q_proj.weight.data.mul_(ratio)
            layer.input_layernorm.weight.data.div_(torch.where(ratio == 0, torch.ones_like(ratio), ratio))


@dataclass(frozen=True, eq=False)
class _Positions:
    """One document's regression data: N anchors; state features, token embeddings by offset, and the true state by
    slot."""

    features: Tensor
    tokens: list[Tensor]
    truth: list[Tensor]


def _positions(model: DFlashModel, embedding: Tensor, item: Features, where: int) -> _Positions | None:
    config = model.config
    slots = config.block_size
    start, end = max(item.document.prompt_length, 2), len(item.document) - slots
    if end <= start:
        return None
    ids = torch.from_numpy(item.document.ids)
    taps = torch.from_numpy(np.array(item.taps)).float()
    features = model.tap_features(taps.flatten(1))[start - 1 : end - 1]
    normed = rms_norm(embedding[ids].float(), config.rms_norm_eps)
    states = taps[:, where] / config.input_scale
    return _Positions(
        features,
        [normed[start + k : end + k] for k in range(slots)],
        [states[start + k : end + k] for k in range(slots)],
    )


def _ridge(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    penalty = ridge * gram.diagonal().mean()
    return torch.linalg.solve(gram + penalty * torch.eye(len(gram)), cross)


@torch.no_grad()
def fit_direct_path(
    model: DFlashModel, embedding: Tensor, items: Sequence[Features], entering: int, ridge: float = 1e-2
) -> float:
    """Least squares for the direct path. What would enter the copied layers at the anchor and after it (the state after
    tap ``entering``) is predicted from what is known: first slot 0 from the taps one position before and the anchor's
    embedding; then, channel by channel, gain and offset of the later slots; then what the drafted tokens before a slot
    add.

    Args:
        model: direct, with ``normalize_taps``.
        embedding: ``[V, H]``.
        items: documents to fit on.
        entering: a tap of the drafter.
        ridge: relative to the mean eigenvalue.

    Returns:
        The share of the state's energy that slot 0 explains.
    """
    config = model.config
    hidden, slots = config.hidden_size, config.block_size
    where = config.target_layer_ids.index(entering)
    data = [p for i in items if (p := _positions(model, embedding, i, where)) is not None]
    if not data:
        raise InvalidInputError("no document is long enough to fit the direct path on")
    known = [torch.cat([p.features, p.tokens[0]], 1) for p in data]
    gram = sum((x.T @ x for x in known), torch.zeros(()))
    cross = sum((x.T @ p.truth[0] for x, p in zip(known, data, strict=True)), torch.zeros(()))
    weights = _ridge(gram, cross, ridge)
    energy = sum(float(p.truth[0].square().sum()) for p in data)
    explained = float((2 * (weights * cross).sum() - (weights * (gram @ weights)).sum()) / energy)
    split = len(config.target_layer_ids) * hidden
    model.option("state").weight.copy_(weights[:split].T)
    model.option("token").weight.copy_(weights[split:].T)
    guess = torch.cat([x @ weights for x in known])
    truth = [torch.cat([p.truth[k] for p in data]) for k in range(slots)]
    mean = guess.mean(0)
    for k in range(slots):
        centred = guess - mean
        gain = (centred * (truth[k] - truth[k].mean(0))).sum(0) / centred.square().sum(0).clamp(min=1e-6)
        if k == 0:
            gain = torch.ones_like(gain)
        model.option("gain").weight[k] = gain
        model.option("slot").weight[k] = truth[k].mean(0) - gain * mean
    if config.late_mlp:
        window = config.correction_window
        gram, cross = torch.zeros(window * hidden, window * hidden), torch.zeros(window * hidden, hidden)
        for k in range(1, slots):
            left = truth[k] - (guess * model.option("gain").weight[k] + model.option("slot").weight[k])
            nearest = [torch.cat([p.tokens[k - j] for p in data]) for j in range(min(k, window))]
            nearest += [torch.zeros_like(nearest[0])] * (window - len(nearest))
            x = torch.cat(nearest, 1)
            gram += x.T @ x
            cross += x.T @ left
        model.option("inject").token_proj.weight.copy_(_ridge(gram, cross, ridge).T)
    logger.info("direct path fitted on %d anchors: %.1f%% of the energy explained", len(guess), 100 * explained)
    return explained


def typical_rms(items: Sequence[Features], column: int) -> float:
    """Median root mean square of a stored tap over the documents."""
    values = [np.sqrt((np.asarray(i.taps[1:, column], np.float32) ** 2).mean(-1)) for i in items]
    return float(np.median(np.concatenate(values)))
