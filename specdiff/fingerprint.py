"""Whether a model still computes what it did: its weights, its hooks, its mode, its active adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 16
"""Values of each parameter that are looked at."""
OBSERVERS = ("transformers.utils.output_capturing", "specdiff.")
"""Modules whose hooks only look: transformers leaves some on a model after ``output_hidden_states``."""

ADAPTER = ("active_adapters", "disable_adapters")
"""What a layer with adapters (of PEFT) says about them."""

Fingerprint = tuple[Any, ...]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Changes whenever a parameter is written, replaced or moved, a hook appears, or another adapter is made active.
    The first item is the number of modules that carry hooks.

    Writes through ``parameter.data`` leave no trace in torch, so some values of each parameter are part of it: what
    touches only a few elements that way can be missed.
    """
    hooks, adapters = 0, []
    kinds: dict[type, bool] = {}
    parameters: list[Tensor] = []
    for module in model.modules():
        hooks += interferes(module)
        parameters += [p for p in module._parameters.values() if p is not None]
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _has_adapters(kind)
        if kinds[kind]:
            adapters.append(tuple(str(getattr(module, key)) for key in ADAPTER))
    versions = tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)
    plain = [p for p in parameters if type(p.data) is Tensor and not p.is_meta]
    places = tuple(p.data_ptr() for p in plain)
    return hooks, model.training, tuple(adapters), versions, places, _values(plain)


def _has_adapters(kind: type) -> bool:
    return all(isinstance(getattr(kind, key, None), property) for key in ADAPTER)


def interferes(module: nn.Module) -> bool:
    """Whether something may change what this module computes: a hook that is no mere observer, or a replaced
    forward."""
    if "forward" in vars(module):
        return True
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(OBSERVERS) for hook in hooks)


@torch.no_grad()
def _values(parameters: list[Tensor]) -> tuple[bytes, ...]:
    """Evenly spaced values of all parameters, as bytes, those of one device and dtype together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        if p.numel() and p.is_contiguous():
            step = max(1, p.numel() // SAMPLES)
            some = p.as_strided((-(-p.numel() // step),), (step,))  # one operator: this runs before every request
            groups.setdefault((p.device, p.dtype), []).append(some)
    return tuple(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in groups.values())
