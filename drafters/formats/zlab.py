"""The z-lab DFlash layout (``DFlashDraftModel``), old revisions and new.

New revisions nest ``block_size`` in ``dflash_config`` and the rotary base in ``rope_parameters``, and may have sliding
layers. ``block_size`` counts the anchor. Taps name the state after a layer, as in specdiff. Layers with a window are
causal inside the block, others are not, unless ``is_causal`` says it for all of them. Nothing of the target is stored.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.formats.layout import (
    Layout,
    TargetShape,
    Values,
    build,
    check_rope,
    drafted,
    layer_types,
    refuse,
    windows,
)
from specdiff.errors import FormatError

ARCHITECTURE = "DFlashDraftModel"


def recognises(values: dict[str, Any]) -> bool:
    """By architecture: ``model_type`` says qwen3."""
    return ARCHITECTURE in (values.get("architectures") or ()) and not values.get("speculators_model_type")


def settings(values: dict[str, Any], target: TargetShape | None = None) -> DFlashConfig:
    """Settings: nested values first, then the top level.

    Raises:
        FormatError: a missing or impossible value, or a feature that specdiff's drafters do not have.
    """
    return build(**shared(values, target) | own(values))


def own(values: dict[str, Any]) -> dict[str, Any]:
    """Settings beyond the layout, which specdiff writes under a name of its own.

    Raises:
        FormatError: unknown ones.
    """
    extra = dict(values.get("specdiff") or {})
    if unknown := set(extra) - {f.name for f in fields(DFlashConfig)}:
        raise FormatError(f"unknown drafter settings {sorted(unknown)}: written by a newer specdiff?")
    return extra


def shared(values: dict[str, Any], target: TargetShape | None) -> dict[str, Any]:
    """Keyword arguments of the settings; DFlash 2 and DSpark add their own."""
    nested, rope = values.get("dflash_config") or {}, values.get("rope_parameters") or {}
    found = Values(nested, rope, values)
    check_rope(rope or values.get("rope_scaling") or {})
    refuse(
        found, attention_bias=False, hidden_act="silu", attention_sink_bias=False, attention_value_scale=None,
        is_neox_style=True, use_aux_hidden_state=True, logit_scale=1.0, quantization_config=None,
        add_swa_attention_sink_bias=False,
    )  # fmt: skip
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    refuse(found, target_hidden_size=hidden)
    layers = found.get("num_target_layers", *([target.layers] if target else []))
    count = len(found.get("target_layer_ids", ())) or int(found.get("num_taps", values["num_hidden_layers"]))
    kinds = found.get("layer_types", None)
    if found.get("use_swa", False) and "sliding_attention" not in (kinds or ()):
        kinds = ["sliding_attention"] * found.get("num_hidden_layers")
    slides = "sliding_attention" in (found.get("layer_types", None) or ())  # by use_swa alone: not causal
    sizes = windows(kinds, found.get("swa_window_size", found.get("sliding_window", None)))
    override = Values(values, nested).get("is_causal", found.get("causal", None))
    return {
        "hidden_size": hidden,
        "intermediate_size": found.get("intermediate_size"),
        "num_layers": found.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads", heads),
        "head_dim": found.get("head_dim", hidden // heads),
        "vocab_size": found.get("vocab_size"),
        "num_target_layers": layers,
        "target_layer_ids": tuple(found.get("target_layer_ids", default_taps(layers, count))),
        "block_size": drafted(found.get("block_size"), anchor_counted=True),
        "mask_token_id": found.get("mask_token_id", None),
        "rms_norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": found.get("rope_theta", 10000.0),
        "windows": sizes,
        "causal": bool(override) and 0 in (sizes or (0,)),
        "sliding_causal": bool(sizes) and (slides if override is None else bool(override)),
        "input_embedding_scale": found.get("input_embedding_scale", 1.0),
        "output_multiplier": found.get("output_multiplier", 1.0),
        "final_logit_softcapping": found.get("final_logit_softcapping", None) or None,
    }


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Taps where none are named: ``round(1 + i (L - 4) / (n - 1))``, and L // 2 for a single one."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def values(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """``config.json``."""
    nested: dict[str, Any] = {"target_layer_ids": list(config.target_layer_ids), "block_size": config.block_size + 1}
    if config.mask_token_id is not None:
        nested["mask_token_id"] = config.mask_token_id
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **backbone(config, target),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size + 1,
        "dflash_config": nested,
    }
    kinds = {config.sliding_causal if window else config.causal for window in config.windows or (0,)}
    if len(kinds) == 1:  # else full layers see the whole block and sliding ones do not: no is_causal means just that
        out["is_causal"] = kinds.pop()
    if config.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        nested["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    return out


def backbone(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """What a Qwen3 configuration says about the draft layers."""
    out: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "vocab_size": config.vocab_size,
        "layer_types": layer_types(config),
        "tie_word_embeddings": False,
    }
    if config.windows:
        out |= {"sliding_window": max(config.windows), "use_sliding_window": True}
    if target.positions:
        out["max_position_embeddings"] = target.positions
    return out


LAYOUT = Layout("zlab", recognises, settings, values)
