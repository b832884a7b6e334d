"""From the arguments of a call to the settings of the loop: every check that needs no compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from specdiff.diffusion.caches import BlockCache, make_cache
from specdiff.diffusion.denoiser import Denoiser, DenoiserLike
from specdiff.diffusion.draws import Draws, TorchDraws
from specdiff.diffusion.guidance import GuidedDenoiser
from specdiff.diffusion.loop import Settings
from specdiff.diffusion.policies import Policy, make_policy
from specdiff.diffusion.sampling import Sampling
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.stop import Ending
from specdiff.errors import InvalidInputError, UnsupportedError

_AR = DLMSpec(name="ar", mask_id=0, shift=1, attention="causal", block_size=1)


def choose(
    denoiser: DenoiserLike,
    *,
    policy: str | Policy | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    cache: str | BlockCache | None = None,
    ar: Any = None,
    cfg_scale: float = 0.0,
    draws: str | Draws = "counter",
    generator: torch.Generator | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    do_sample: bool | None = None,
) -> tuple[Settings, DenoiserLike]:
    """Check what a call asks for against the model, before any compute.

    Args:
        denoiser: the model.
        policy: name or object, None for the spec's.
        options: of the policy.
        cache: name or object, None for the spec's (or none where the model takes no cache).
        ar: AR model of the same vocabulary, for policies that need one.
        cfg_scale: guidance; 0 is none.
        draws: "counter", "torch", or an object.
        generator: for "torch".
        temperature: 0 is greedy.
        top_k: filter.
        top_p: filter.
        do_sample: False is temperature 0; True with temperature 0 is temperature 1.

    Returns:
        the settings, and the denoiser (with guidance around it if asked for).

    Raises:
        InvalidInputError: values out of range or options that do not exist.
        UnsupportedError: policy or cache do not fit the model.
    """
    spec = denoiser.spec
    given = dict(options)
    if policy is None or policy == spec.policy:
        given = {**spec.options, **given}
    chosen = make_policy(policy or spec.policy, given)
    if chosen.corruption != spec.corruption:
        raise UnsupportedError(
            f"policy {chosen.name!r} is for {chosen.corruption} noise; {spec.name} has {spec.corruption}"
        )
    if chosen.name == "sub_block" and spec.sub_block is None:
        raise InvalidInputError(f"policy 'sub_block' needs a sub_block size in the spec of {spec.name}")
    plan = make_cache(spec.cache if cache is None else cache, spec)
    if plan.stores and not denoiser.supports_cache:
        if cache is not None:
            raise UnsupportedError(f"{spec.name}: this model takes no key/value cache")
        plan = BlockCache()
    if not chosen.sticky and plan.limits_wants:
        raise UnsupportedError(f"cache {plan.name!r} hides committed tokens from policy {chosen.name!r}")
    if chosen.needs_ar and ar is None:
        raise InvalidInputError(f"policy {chosen.name!r} needs ar=, an autoregressive model of the same vocabulary")
    helper = None
    if ar is not None:
        helper = ar if not isinstance(ar, nn.Module) else Denoiser(ar, _AR)
        if helper.vocab_size != denoiser.vocab_size:
            raise InvalidInputError(
                f"ar has {helper.vocab_size} tokens, the diffusion model {denoiser.vocab_size}: they must be the same"
            )
    if chosen.own_law:
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        refused = [name for name, value in asked.items() if value]
        refused += ["do_sample=False"] if do_sample is False else []
        if refused:
            raise InvalidInputError(
                f"policy {chosen.name!r} always draws by its own schedule of temperatures, without filters: leave out "
                f"{', '.join(refused)}; its options are {', '.join(f.name for f in fields(chosen))}"
            )
    heat = 0.0 if do_sample is False else 1.0 if do_sample and temperature == 0 else temperature
    sampling = Sampling(heat, top_k, top_p, spec.convention)
    source = TorchDraws(generator) if draws == "torch" else None if draws == "counter" else draws
    if isinstance(source, str):
        raise InvalidInputError(f"draws must be 'counter', 'torch' or an object, not {source!r}")
    if not cfg_scale >= 0:
        raise InvalidInputError(f"cfg_scale must be >= 0, not {cfg_scale}")
    if cfg_scale:
        denoiser = GuidedDenoiser(denoiser, cfg_scale)
    settings = Settings(policy=chosen, sampling=sampling, cache=plan, ending=Ending(), draws=source, ar=helper)
    return settings, denoiser


def notes_of(settings: Settings) -> list[str]:
    """Approximations in force."""
    notes = []
    if not settings.cache.exact:
        notes.append(f"cache '{settings.cache.name}' is approximate")
    if settings.window is not None:
        notes.append(f"context window of {settings.window} tokens is approximate")
    if settings.policy.needs_ar:
        notes.append(f"policy '{settings.policy.name}' keeps neither model's law")
    return notes
