"""DSpark checkpoints (``Qwen3DSparkModel``): a DFlash block with a Markov head and a confidence head.

Each slot, the anchor's included, drafts the token after it unless ``sample_from_anchor`` is false, so ``block_size`` is
the number of drafted tokens. Only the vanilla (first-order) Markov head is served; others are refused by name. Taps
name the state after a layer.
"""

from __future__ import annotations

from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.formats import zlab
from specdiff.drafters.formats.layout import Layout, TargetShape, Values, build, drafted, refuse
from specdiff.errors import FormatError

ARCHITECTURE = "Qwen3DSparkModel"


def recognises(values: dict[str, Any]) -> bool:
    """By architecture."""
    return ARCHITECTURE in (values.get("architectures") or ()) and not values.get("speculators_model_type")


def settings(values: dict[str, Any], target: TargetShape | None = None) -> DFlashConfig:
    """Settings; nested values first, as in the z-lab layout.

    Raises:
        FormatError: a missing or impossible value, or a head of another type.
    """
    found = Values(values.get("dflash_config"), values)
    own = {
        "target_layer_ids": found.get("target_layer_ids", found.get("dspark_target_layer_ids", None)),
        "mask_token_id": found.get("mask_token_id", found.get("dspark_noise_token_id", None)),
        "block_size": found.get("block_size", found.get("dspark_block_size", None)),
    }
    nested = (values.get("dflash_config") or {}) | {name: value for name, value in own.items() if value is not None}
    if int(found.get("markov_rank")) < 1:
        raise FormatError("a DSpark drafter has a Markov head: markov_rank must be at least 1")
    fields = zlab.shared(values | {"dflash_config": nested | {"block_size": 2}}, target)
    return build(**fields | heads(found, anchor_default=True, size=Values(nested).get("block_size")))


def heads(found: Values, anchor_default: bool, size: int) -> dict[str, Any]:
    """The settings that make a DFlash drafter a DSpark one."""
    rank = int(found.get("markov_rank"))
    refuse(found, markov_head_type="vanilla", dspark_draft_topk=None)
    anchor = bool(found.get("sample_from_anchor", anchor_default))
    confident = bool(found.get("enable_confidence_head", False))
    return {
        "block_size": drafted(size, anchor_counted=not anchor),
        "anchor_predicts": anchor,
        "transition_rank": rank,
        "draft_vocab_size": pruned(found),
        "confidence": confident,
        "confidence_sees_token": confident and bool(found.get("confidence_head_with_markov", False)),
    }


def pruned(found: Values) -> int:
    """Columns of a pruned draft vocabulary, 0 for none."""
    size = int(found.get("draft_vocab_size", 0))
    return size if 0 < size < int(found.get("vocab_size")) else 0


def head_values(config: DFlashConfig) -> dict[str, Any]:
    """The inverse of :func:`heads`."""
    return {
        "block_size": config.block_size + int(config.anchor_slot),
        "sample_from_anchor": config.anchor_predicts,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "markov_rank": config.transition_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_sees_token,
    }


def values(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """``config.json``."""
    out = zlab.values(config, target)
    del out["dflash_config"]
    return out | {
        "architectures": [ARCHITECTURE],
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        **head_values(config),
    }


LAYOUT = Layout("dspark", recognises, settings, values, own_weights=True)
