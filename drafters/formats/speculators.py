"""The speculators layout (vLLM): types ``dflash``, ``dflash2`` and ``dspark``.

The draft layers are a nested transformers configuration, of which only what differs from its class's defaults may be
written. ``aux_hidden_state_layer_ids`` count states, the embedding being 0: a tap here is one more than in specdiff.
``block_size`` counts the anchor unless ``sample_from_anchor``. Full layers see the whole block; layers with a window do
so if ``sliding_window_non_causal``. A pruned vocabulary is a pair of maps: ``t2d``, booleans by target id, and ``d2t``,
the target id of each draft id less the draft id; its output rows are stored.
"""

from __future__ import annotations

from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.formats import dflash2, dspark, zlab
from specdiff.drafters.formats.layout import (
    Layout,
    TargetShape,
    Values,
    build,
    depth,
    drafted,
    refuse,
    states_of,
    taps_after,
)
from specdiff.errors import FormatError

KINDS = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
"""Type, and the architecture that is written with it."""


def recognises(values: dict[str, Any]) -> bool:
    """By ``speculators_model_type``; which types are read is checked with the settings."""
    return bool(values.get("speculators_model_type"))


def settings(values: dict[str, Any], target: TargetShape | None = None) -> DFlashConfig:
    """Settings.

    Raises:
        FormatError: another type of speculator, a missing or impossible value, or no target to take the depth from.
    """
    kind = values.get("speculators_model_type")
    if kind not in KINDS:
        raise FormatError(f"speculators of type {kind!r} are not supported; {', '.join(KINDS)} are")
    shape = depth("speculators", target)
    layers = layer_settings(values.get("transformer_layer_config"))
    found = Values(values, layers)
    refuse(found, target_hidden_size=found.get("hidden_size"))
    ids = found.get("aux_hidden_state_layer_ids")
    nested = {"target_layer_ids": taps_after(ids), "block_size": 2, "mask_token_id": found.get("mask_token_id")}
    fields = zlab.shared(layers | {"num_target_layers": shape.layers, "dflash_config": nested}, target)
    fields |= {"causal": False, "sliding_causal": _sliding_causal(kind, found, bool(fields["windows"]))}
    if max(fields["target_layer_ids"]) == shape.layers - 1:
        raise FormatError(
            f"aux_hidden_state_layer_ids {list(ids)}: runners disagree whether the state after the last layer is "
            "normalised, so a drafter that reads it is not loaded"
        )
    anchor = _from_anchor(kind, found)
    size = int(found.get("block_size"))
    fields |= {
        "block_size": drafted(size, anchor_counted=not anchor),
        "anchor_predicts": anchor,
        "draft_vocab_size": 0,
    }
    if kind == "dflash2":
        fields |= dflash2.additions(found)
    if kind == "dspark":
        fields |= dspark.heads(found, anchor_default=anchor, size=size)
    return build(**fields)


def layer_settings(values: Any) -> dict[str, Any]:
    """The nested configuration with its class's defaults filled in.

    Raises:
        FormatError: it is missing, or of a model that transformers does not know.
    """
    from transformers import CONFIG_MAPPING

    if not isinstance(values, dict):
        raise FormatError("config.json has no transformer_layer_config")
    kind = values.get("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        raise FormatError(f"transformer_layer_config describes a {kind!r} model, which transformers does not know")
    filled = CONFIG_MAPPING[kind](**values).to_dict()
    return {name: value for name, value in filled.items() if name != "architectures"}


def _sliding_causal(kind: str, found: Values, sliding: bool) -> bool:
    return sliding and not found.get("sliding_window_non_causal", kind == "dflash2")


def _from_anchor(kind: str, found: Values) -> bool:
    if kind == "dspark" and found.get("sample_from_anchor", None) is None:
        raise FormatError("config.json does not say whether the anchor's slot drafts (sample_from_anchor)")
    return bool(found.get("sample_from_anchor", False))


def kind_of(config: DFlashConfig) -> str:
    """Which type of speculator a drafter is."""
    if config.transition_rank:
        return "dspark"
    return "dflash2" if config.conv_kernel and config.selector_rank else "dflash"


def values(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """``config.json``."""
    kind = kind_of(config)
    out: dict[str, Any] = {
        "architectures": [KINDS[kind]],
        "model_type": "speculator_model",
        "speculators_model_type": kind,
        "transformer_layer_config": {
            "model_type": "qwen3",
            **zlab.backbone(config, target),
            "max_window_layers": 0,
        },
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size + int(config.anchor_slot),
        "aux_hidden_state_layer_ids": states_of(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": not config.sliding_causal,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }
    if kind == "dflash2":
        out |= dflash2.addition_values(config)
    if kind == "dspark":
        out |= dspark.head_values(config)
    return out


LAYOUT = Layout("speculators", recognises, settings, values, aliases=dflash2.ALIASES, own_weights=True)
