"""Which kind of state each layer of a model keeps, read from transformers' own cache for that configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


@dataclass(frozen=True)
class LayerPlan:
    """What one cache layer keeps.

    Attributes:
        attention: ``full``, ``indexed``, ``sliding``, ``chunked``, or None for a layer without keys and values.
        window: tokens that a query of a sliding layer sees (the chunk size of a chunked one), else 0.
        states: recurrent states, else 0.
    """

    attention: str | None = None
    window: int = 0
    states: int = 0

    @property
    def word(self) -> str:
        """How the layer is called in reports."""
        parts = [self.attention] if self.attention else []
        return "+".join([*parts, *(["recurrent"] if self.states else [])]) or "none"


_CLASSES: dict[type, tuple[str | None, bool]] = {
    DynamicLayer: ("full", False),
    DynamicIndexedLayer: ("indexed", False),
    DynamicSlidingWindowLayer: ("sliding", False),
    LinearAttentionLayer: (None, True),
    LinearAttentionAndFullAttentionLayer: ("full", True),
    LinearAttentionAndSlidingWindowAttentionLayer: ("sliding", True),
    DummyLayer: (None, False),
}


FAULTS = {
    "moshi": (
        "in transformers its cache forgets what lies behind the window while its uncached pass attends to it, so past "
        "the window no text is the right one"
    ),
    "reformer": "in transformers its pass fails on position_ids as soon as it pads the text to whole chunks",
}
"""Faults of transformers that a short pass cannot show, by model type."""


def layer_plans(config: PreTrainedConfig) -> list[LayerPlan] | None:
    """One plan per cache layer, or None when the configuration has a kind of layer that is not known here."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    chunk = getattr(config.get_text_config(decoder=True), "attention_chunk_size", None)
    plans = []
    for at, layer in enumerate(layers):
        if type(layer) not in _CLASSES:
            return None
        attention, recurrent = _CLASSES[type(layer)]
        window = int(getattr(layer, "sliding_window", 0) or 0)
        if attention == "sliding":
            named = types[at] if types is not None and len(types) == len(layers) else None
            if named == "chunked_attention" or (named is None and window == chunk):
                attention = "chunked"
        states = int(getattr(layer, "number_of_states", 1)) if recurrent else 0
        plans.append(LayerPlan(attention, window, states))
    return plans or None


def hides_a_window(config: PreTrainedConfig, plans: list[LayerPlan] | None) -> bool:
    """Whether the model masks a window by itself that its cache knows nothing of (GPT-Neo's local attention).

    Such a mask counts columns back from the end of the keys, which is only right where all rows begin together.
    """
    text = config.get_text_config()
    names = ("window_size", "attention_window", "attention_window_size", "local_window_size")
    own = any(isinstance(getattr(text, name, None), int) for name in names)
    return own and not any(plan.window for plan in plans or ())


def kinds_in_words(plans: list[LayerPlan] | None) -> str:
    """``full``, ``full, sliding``, ...: the distinct kinds of a model's layers."""
    if plans is None:
        return "own cache"
    return ", ".join(sorted({plan.word for plan in plans} - {"none"})) or "none"


def refusal(model: PreTrainedModel) -> str | None:
    """Why this model cannot be served at all, with the remedy, or None when nothing rules it out at sight."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return "it is compiled, and passes of ever new shapes would compile again; wrap the model before compiling"
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; specdiff wraps decoder-only causal LMs"
    if not hasattr(model, "generate") or not model.can_generate():
        return "it has no language-modelling head to generate with; load it with AutoModelForCausalLM"
    if config.model_type in FAULTS:
        return f"{FAULTS[config.model_type]}; use plain generate for it"
    if getattr(config.get_text_config(), "keep_window_size", None) is not None:
        return (
            "its dynamic mask picks keep_window_size keys per pass, and in transformers a pass over several tokens "
            "picks others than passes over one token do once the text is longer; use plain generate for it"
        )
    implementations = {
        getattr(part, "_attn_implementation", None) or "eager" for part in (config, config.get_text_config())
    }
    flash = sorted(name for name in implementations if "flash" in name)
    if flash:
        return (
            f"its attention implementation is {flash[0]!r}, which takes no additive mask; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    return None
