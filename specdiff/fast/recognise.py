"""Does a model consist of the parts that the fast path knows? One look at its modules answers for every family.

The pattern, with H the width, D the head width, and everything in brackets optional:

    x = embed(ids)
    each layer:  x += [norm](o(attend(rotate([norm] q(n)), rotate([norm] k(n)), v(n))))      n = norm(x)
                 x += [norm](down(act(gate(n)) * up(n)))                                     n = norm(x)
    logits = [softcap](head(norm(x)))

Llama, Qwen2, Qwen3, Mistral, SmolLM, SmolLM3, Gemma and Gemma 3 are of this kind. A model is taken only if every
parameter it has is one of these parts, nothing hooks into it, and (in :mod:`specdiff.fast.target`) its own forward
pass gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.cache.kinds import layer_plans
from specdiff.cache.rope import turning_point
from specdiff.fingerprint import interferes


class NotRecognisedError(Exception):
    """Carries the reason why a model is not of the known pattern."""


@dataclass(frozen=True)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    weight: Tensor
    eps: float
    source: Tensor
    """The module's own parameter: ``weight`` or ``weight - 1``."""


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer: its linear layers and norms, and how its attention is set up."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: Callable[[Tensor], Tensor]
    attention_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    after_attention: Norm | None
    after_mlp: Norm | None
    scaling: float
    rotary: str | None
    """Which rotary table applies: a layer type, ``""`` when there is one for all, None for no rotation."""


@dataclass(frozen=True)
class Parts:
    """All parts of a recognised model."""

    embed: nn.Module
    layers: list[LayerParts]
    norm: Norm
    head: nn.Linear
    rotary: nn.Module
    softcap: float | None
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    """Smallest attention window: longer requests do not fit this path. None when all layers see everything."""


def recognise(model: PreTrainedModel) -> Parts:
    """Find the parts of ``model``.

    Raises:
        NotRecognisedError: with the reason, when the model is not of the known pattern.
    """
    _check_plain(model)
    decoder = getattr(model, "model", None)
    parts = [getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
    head = getattr(model, "lm_head", None)
    if any(part is None for part in parts) or not isinstance(head, nn.Linear):
        raise NotRecognisedError("its decoder is not made of embed_tokens, layers, norm, rotary_emb and lm_head")
    embed, layers, norm, rotary = cast(list[Any], parts)
    config = model.config.get_text_config()
    window = _window(model)
    found = [_layer(layer, rotary) for layer in layers]
    head_dim = found[0].q.out_features // config.num_attention_heads
    result = Parts(
        embed=embed,
        layers=found,
        norm=_norm(norm),
        head=head,
        rotary=rotary,
        softcap=getattr(config, "final_logit_softcapping", None),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=found[0].k.out_features // head_dim,
        head_dim=head_dim,
        window=window,
    )
    _check_shapes(result)
    _check_all_used(model, result)
    return result


def _check_plain(model: PreTrainedModel) -> None:
    """Refuse models that are not stock float32 CPU modules."""
    if not type(model).__module__.startswith("transformers.models."):
        raise NotRecognisedError(f"{type(model).__name__} is not a class of transformers itself")
    for name, tensor in model.named_parameters():
        if tensor.device.type != "cpu":
            raise NotRecognisedError(f"its weights are on {tensor.device}; the fast path is for CPUs")
        if tensor.dtype != torch.float32:
            raise NotRecognisedError(
                f"it computes in {str(tensor.dtype)[6:]} ({name}); load it with dtype=torch.float32"
            )
    for name, module in model.named_modules():
        if interferes(module):
            raise NotRecognisedError(f"{name or 'the model'} carries hooks or a replaced forward")
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            raise NotRecognisedError(f"{name} is a {type(module).__name__}, not a plain Linear")
        if model.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise NotRecognisedError("it is in training mode with dropout; call model.eval()")
    config = model.config.get_text_config()
    if model.training and getattr(config, "attention_dropout", None):
        raise NotRecognisedError("it is in training mode with dropout; call model.eval()")
    if getattr(config, "attn_logit_softcapping", None):
        raise NotRecognisedError("its attention scores are soft-capped")
    if turning_point(config) is not None:
        raise NotRecognisedError("its rotary frequencies depend on the length of the text")
    rope = getattr(config, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope or getattr(config, "attn_temperature_tuning", None):
        raise NotRecognisedError("its queries are scaled by their position")


def _window(model: PreTrainedModel) -> int | None:
    plans = layer_plans(model.config)
    if plans is None or any(plan.attention not in ("full", "sliding", "chunked") or plan.states for plan in plans):
        raise NotRecognisedError("its layers keep more than plain keys and values")
    return min((plan.window for plan in plans if plan.attention != "full"), default=None)


def _layer(layer: Any, rotary: nn.Module) -> LayerParts:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        raise NotRecognisedError(f"{type(layer).__name__} has no self_attn and mlp")
    sandwich = getattr(layer, "pre_feedforward_layernorm", None) is not None
    by_type = len(getattr(rotary, "layer_types", ())) > 0
    turns = bool(getattr(attention, "use_rope", True))
    return LayerParts(
        q=_linear(attention, "q_proj"),
        k=_linear(attention, "k_proj"),
        v=_linear(attention, "v_proj"),
        o=_linear(attention, "o_proj"),
        gate=_linear(mlp, "gate_proj"),
        up=_linear(mlp, "up_proj"),
        down=_linear(mlp, "down_proj"),
        act=_activation(mlp),
        attention_norm=_norm(getattr(layer, "input_layernorm", None)),
        mlp_norm=_norm(getattr(layer, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm", None)),
        q_norm=_norm(attention.q_norm) if getattr(attention, "q_norm", None) is not None else None,
        k_norm=_norm(attention.k_norm) if getattr(attention, "k_norm", None) is not None else None,
        after_attention=_norm(layer.post_attention_layernorm) if sandwich else None,
        after_mlp=_norm(getattr(layer, "post_feedforward_layernorm", None)) if sandwich else None,
        scaling=float(getattr(attention, "scaling", 0.0)),
        rotary=(getattr(attention, "layer_type", None) if by_type else "") if turns else None,
    )


def _linear(owner: nn.Module, name: str) -> nn.Linear:
    found = getattr(owner, name, None)
    if not isinstance(found, nn.Linear):
        raise NotRecognisedError(f"{type(owner).__name__} has no linear layer {name}")
    return found


def _activation(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    act = getattr(mlp, "act_fn", None)
    if not callable(act):
        raise NotRecognisedError(f"{type(mlp).__name__} has no act_fn")
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        raise NotRecognisedError("its activation has parameters")
    with torch.no_grad():
        probe = torch.linspace(-4, 4, 33)
        same = torch.allclose(act(probe), nn.functional.silu(probe), atol=1e-6)
    return nn.functional.silu if same else act


def _norm(module: nn.Module | None) -> Norm:
    """An RMS norm whose weight is ``w`` or ``1 + w``: which of them, its output for ones tells."""
    weight = getattr(module, "weight", None)
    eps: Any = vars(module).get("variance_epsilon", vars(module).get("eps")) if module is not None else None
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        raise NotRecognisedError(f"{type(module).__name__} is not an RMS norm")
    with torch.no_grad():
        seen = module(torch.ones(1, weight.shape[0], dtype=weight.dtype))[0] * math.sqrt(1.0 + eps)
        for candidate in (weight, 1.0 + weight):
            if torch.allclose(seen, candidate, atol=1e-5, rtol=1e-5):
                return Norm(candidate.detach(), float(eps), weight)
    raise NotRecognisedError(f"{type(module).__name__} is not an RMS norm")


def _check_shapes(parts: Parts) -> None:
    kv, width = parts.kv_heads * parts.head_dim, parts.heads * parts.head_dim
    for layer in parts.layers:
        shapes = (layer.q.out_features, layer.k.out_features, layer.v.out_features, layer.o.in_features)
        if shapes != (width, kv, kv, width) or layer.scaling <= 0.0:
            raise NotRecognisedError("its attention projections do not share one head layout")
        if any(norm is not None and norm.weight.shape[0] != parts.head_dim for norm in (layer.q_norm, layer.k_norm)):
            raise NotRecognisedError("its query and key norms are not per head")
    if parts.heads % parts.kv_heads or parts.head_dim % 2:
        raise NotRecognisedError("its heads cannot be grouped")


def _check_all_used(model: PreTrainedModel, parts: Parts) -> None:
    """Every parameter must belong to a recognised part, otherwise the model does something that is not known here."""
    used = {id(p) for owner in (parts.embed, parts.head) for p in owner.parameters()}
    used.add(id(parts.norm.source))
    for layer in parts.layers:
        for linear in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
            used |= {id(p) for p in linear.parameters()}
        norms = (
            layer.attention_norm,
            layer.mlp_norm,
            layer.q_norm,
            layer.k_norm,
            layer.after_attention,
            layer.after_mlp,
        )
        used |= {id(norm.source) for norm in norms if norm is not None}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            raise NotRecognisedError(f"it has the parameter {name}, which is no part of the known pattern")
