"""The spec and the denoiser of a model that is already loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdiff.diffusion.denoiser import Adapter, Denoiser, DenoiserLike
from specdiff.diffusion.presets import preset as named
from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import InvalidInputError

CONTINUOUS = ("diffusion-lm", "diffuseq", "ar-diffusion", "genie", "plaid", "ssd-lm", "cdcd", "dit", "tess")
"""Names of continuous (embedding or image) diffusion, which has no token canvas."""


def spec_for(model: Any, preset: str | DLMSpec | None, tokenizer: Any, changes: Mapping[str, Any]) -> DLMSpec:
    """The spec of a model: what was given, or what its class and config say, with ``changes`` applied."""
    if isinstance(preset, DLMSpec):
        spec = preset
    elif preset is not None:
        spec = named(preset)
    else:
        spec = _guess(model)
    spec = _from_config(model, spec, changes)
    if spec.name == "bert" and "mask_id" not in changes and getattr(tokenizer, "mask_token_id", None) is not None:
        spec = spec.replace(mask_id=tokenizer.mask_token_id)
    return spec.replace(**changes)


def _guess(model: Any) -> DLMSpec:
    spec = getattr(model, "spec", None)
    if isinstance(spec, DLMSpec):
        return spec
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if kind == "DiffusionGemmaForBlockDiffusion":
        return named("diffusion-gemma")
    if "MaskedLM" in kind:
        return named("bert")
    if kind == "LLaDA2MoeForCausalLM":
        return named("llada2.0")
    if kind == "BD3LM":
        return named("bd3lm")
    raise InvalidInputError(
        f"{kind} (model_type {getattr(config, 'model_type', None)!r}) does not say which diffusion model it is: "
        "give preset= or a DLMSpec"
    )


def _from_config(model: Any, spec: DLMSpec, changes: Mapping[str, Any]) -> DLMSpec:
    """What only the model knows: DiffusionGemma's canvas length and end ids, a masked LM's special ids."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = {}
    if spec.name == "diffusion-gemma" and hasattr(config, "canvas_length"):
        found["block_size"] = config.canvas_length
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(config.text_config, "eos_token_id", None)
        found["eos_ids"] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        pad = getattr(generation, "pad_token_id", None)
        found["pad_id"] = pad if pad is not None else getattr(config.text_config, "pad_token_id", None)
        options = {}
        for ours, theirs in (
            ("steps", "max_denoising_steps"),
            ("t_min", "t_min"),
            ("t_max", "t_max"),
            ("stability", "stability_threshold"),
            ("confidence", "confidence_threshold"),
        ):
            value = getattr(generation, theirs, None)
            if value is not None:
                options[ours] = value
        bound = getattr(getattr(generation, "sampler_config", None), "entropy_bound", None)
        if bound is not None:
            options["bound"] = bound
        found["options"] = {**spec.options, **options}
    return spec.replace(**{k: v for k, v in found.items() if k not in changes})


def denoiser_for(model: Any, spec: DLMSpec, adapter: Adapter | None) -> DenoiserLike:
    """The denoiser that fits the model's class; an object that already has the denoiser's methods is taken as it is."""
    if hasattr(model, "logits") and hasattr(model, "vocab_size") and hasattr(model, "new_cache"):
        model.spec = spec
        return model
    if spec.commit == "encoder":
        from specdiff.diffusion.encdec import EncoderDenoiser

        return EncoderDenoiser(model, spec)
    return Denoiser(model, spec, adapter)
