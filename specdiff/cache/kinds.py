"""Which kind of state each layer of a model keeps, read from transformers' own cache for that configuration."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """One word per cache layer: ``full`` for plain attention, otherwise transformers' class name for it.

    The list is empty when transformers creates layers on the fly, which it does for plain attention only.
    """
    layers = DynamicCache(config=config).layers
    return ["full" if type(layer) is DynamicLayer else type(layer).__name__ for layer in layers]


def refusal(model: PreTrainedModel) -> str | None:
    """Why this model's cache cannot be served, with the remedy, or None when it can."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; specdiff wraps decoder-only causal LMs"
    if not hasattr(model, "generate") or not model.can_generate():
        return "it has no language-modelling head to generate with; load it with AutoModelForCausalLM"
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if "flash" in implementation:
        return (
            f"its attention implementation is {implementation!r}, which takes no additive mask; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    others = sorted(set(layer_kinds(config)) - {"full"})
    if others:
        return (
            f"it keeps {', '.join(others)} state, and only full-attention caches are served so far; "
            "use plain generate for it"
        )
    return None
