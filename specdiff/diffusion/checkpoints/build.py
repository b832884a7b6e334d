"""The spec and the denoiser of a model that is already loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from specdiff.diffusion.denoiser import Adapter, Denoiser, DenoiserLike
from specdiff.diffusion.presets import preset as named
from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import InvalidInputError

CONTINUOUS = ("diffusion-lm", "diffuseq", "ar-diffusion", "genie", "plaid", "ssd-lm", "cdcd", "dit", "tess")
"""Names of continuous (embedding or image) diffusion, which has no token canvas."""


_BERT_VOCABULARY = ("bert", "distilbert", "electra", "mobilebert", "squeezebert", "megatron-bert")
"""Model types whose public checkpoints share BERT's ids."""


def spec_for(model: Any, preset: str | DLMSpec | None, tokenizer: Any, changes: Mapping[str, Any]) -> DLMSpec:
    """The spec of a model: what was given, or what its class and config say, with ``changes`` applied."""
    if isinstance(preset, DLMSpec):
        spec = preset
    elif preset is not None:
        spec = named(preset)
    else:
        spec = _guess(model)
    spec = _from_config(model, spec, changes)
    if spec.name == "bert":
        if not isinstance(preset, DLMSpec):
            spec = spec.replace(**masked_lm_ids(getattr(model, "config", None), tokenizer, "mask_id" in changes))
        elif "mask_id" not in changes and getattr(tokenizer, "mask_token_id", None) is not None:
            spec = spec.replace(mask_id=tokenizer.mask_token_id)
    return spec.replace(**changes)


def masked_lm_ids(config: Any, tokenizer: Any, mask_known: bool = False) -> dict[str, Any]:
    """Attributes of a masked LM's spec that its config and tokenizer say: mask, end, padding and forbidden ids.

    BERT's public ids stand only where a model of BERT's own vocabulary says nothing.

    Args:
        config: the model's config, or None.
        tokenizer: its tokenizer, or None.
        mask_known: the caller gives the mask id.
    """

    def find(*names: str) -> Any:
        for name in names:
            for source in (config, tokenizer):
                value = getattr(source, name, None)
                if value is not None:
                    return value
        return None

    found: dict[str, Any] = {}
    own = config is None or getattr(config, "model_type", None) in _BERT_VOCABULARY
    mask = getattr(tokenizer, "mask_token_id", None)
    mask = find("mask_token_id") if mask is None else mask
    if mask is not None:
        found["mask_id"] = int(mask)
    elif not own and not mask_known:
        raise InvalidInputError(
            f"{config.model_type}: the model does not say which id its mask has: give tokenizer= or mask_id="
        )
    eos = find("eos_token_id", "sep_token_id")
    if eos is not None:
        found["eos_ids"] = (eos,) if isinstance(eos, int) else tuple(eos)
    elif not own or tokenizer is not None:
        found["eos_ids"] = ()
    pad = find("pad_token_id")
    if pad is not None:
        found["pad_id"] = int(pad)
    elif not own:
        found["pad_id"] = None
    if not own or tokenizer is not None:
        ends = found["eos_ids"]
        names = ("pad_token_id", "unk_token_id", "cls_token_id", "bos_token_id")
        ids = {getattr(source, name, None) for source in (config, tokenizer) for name in names} - {None}
        found["forbidden_ids"] = tuple(sorted(i for i in ids if i not in ends))
    return found


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
        if getattr(model, "spec", None) == spec:
            return model
        own = copy.copy(model)  # the caller's object keeps its spec
        own.spec = spec
        return own
    if spec.commit == "encoder":
        from specdiff.diffusion.encdec import EncoderDenoiser

        return EncoderDenoiser(model, spec)
    return Denoiser(model, spec, adapter)
