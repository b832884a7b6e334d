"""The layout of transformers' own runner (``muse_glimmer_assistant``, ``speculation_type="dflash"``).

A flat configuration; two parameters are called otherwise. ``block_size`` counts the anchor. Every layer sees its whole
block, layers with a window what lies no further than the window on either side (one token more than elsewhere). Taps
name the state after a layer for transformers 5.24; 5.19 read the state before it, so a drafter for that version is
written with ``for_version``.
"""

from __future__ import annotations

from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.formats import zlab
from specdiff.drafters.formats.layout import Layout, TargetShape, Values, build, depth, refuse, windows
from specdiff.errors import InvalidInputError

MODEL_TYPE = "muse_glimmer_assistant"
RENAMES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


def recognises(values: dict[str, Any]) -> bool:
    """By ``model_type``."""
    return values.get("model_type") == MODEL_TYPE


def settings(values: dict[str, Any], target: TargetShape | None = None) -> DFlashConfig:
    """Settings.

    Raises:
        FormatError: a missing or impossible value, or no target to take depth and vocabulary from.
    """
    shape, found = depth("Muse", target), Values(values)
    kinds = found.get("layer_types", ["sliding_attention"] * found.get("num_hidden_layers"))
    refuse(found, hidden_act="silu")
    nested = {
        "target_layer_ids": found.get("target_layer_ids"),
        "mask_token_id": found.get("mask_token_id"),
        "block_size": found.get("block_size"),
    }
    base = {"vocab_size": shape.vocab, "num_target_layers": shape.layers, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    fields = zlab.shared(base | values | {"layer_types": None, "dflash_config": nested}, target)
    size = found.get("sliding_window", 2048)
    return build(**fields | {"windows": windows(kinds, size + 1), "causal": False, "sliding_causal": False})


def values(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """``config.json``."""
    base = zlab.backbone(config, target)
    for name in ("rope_theta", "vocab_size", "use_sliding_window", "attention_bias", "tie_word_embeddings"):
        base.pop(name, None)
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        **base,
        "sliding_window": max(config.windows, default=2049) - 1,
        "attention_dropout": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "block_size": config.block_size + 1,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def for_version(values: dict[str, Any], version: str) -> dict[str, Any]:
    """``config.json`` for a version of transformers ("5.24"): up to 5.19 it read the state before the named layer.

    Raises:
        InvalidInputError: no version, or one of which it is not known what it reads.
    """
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError as error:
        raise InvalidInputError(f"{version!r} is no version of transformers; write it like 5.24") from error
    if (major, minor) >= (5, 24):
        return values
    if (major, minor) <= (5, 19):
        return values | {"target_layer_ids": [i + 1 for i in values["target_layer_ids"]]}
    raise InvalidInputError(
        f"how transformers {version} counts layers is not known; 5.19 and older, 5.24 and newer are"
    )


LAYOUT = Layout("muse", recognises, settings, values, renames=RENAMES)
