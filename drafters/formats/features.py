"""What a drafter has beyond a plain DFlash block, by the names that ``specdiff export --without`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.errors import InvalidInputError, UnsupportedError

PRUNED = "pruned-vocabulary"

FEATURES: Mapping[str, dict[str, Any]] = {
    "direct-path": {"direct": False, "input_scale": 1.0},
    "normalized-taps": {"normalize_taps": False},
    "sequential-head": {"late_mlp": False, "correction": 0, "correction_window": 1, "markov_rank": 0},
    "no-qk-norm": {"qk_norm": True},
    "convolution": {"conv_kernel": 0, "conv_group": 16},
    "candidate-selector": {"selector_rank": 0, "selector_top_k": 16},
    "transition-head": {"transition_rank": 0, "draft_vocab_size": 0, "confidence_sees_token": False},
    "confidence-head": {"confidence": False, "confidence_sees_token": False},
    "logit-scale": {"output_multiplier": 1.0, "final_logit_softcapping": None},
}
"""Features that can be left out, with the settings that a drafter without them has."""

_FIXED: Mapping[str, tuple[str, ...]] = {
    "causal block": ("causal", "sliding_causal"),
    "sliding window": ("windows",),
    "drafting from the anchor's slot": ("anchor_predicts",),
    "embedding scale": ("input_embedding_scale",),
    "missing mask token": ("mask_token_id",),
}


def without(drafter: DFlashDrafter, names: Sequence[str], mask_token_id: int | None = None) -> DFlashDrafter:
    """A copy of an unbound or bound drafter that lacks some features; it is bound to nothing.

    It drafts worse, and nobody trained it: measure it.

    Args:
        drafter: unchanged.
        names: of :data:`FEATURES`, or ``"pruned-vocabulary"``.
        mask_token_id: needed without the direct path, whose place mask embeddings take.

    Raises:
        InvalidInputError: an unknown name, a feature that the drafter does not have, or no mask token.
        UnsupportedError: the rest cannot stand without it.
    """
    off: dict[str, Any] = {}
    for name in names:
        if name != PRUNED and name not in FEATURES:
            raise InvalidInputError(f"unknown feature {name!r}; known: {', '.join([*FEATURES, PRUNED])}")
        if name not in features(drafter):
            raise InvalidInputError(f"this drafter has no {name} to leave out")
        off |= FEATURES.get(name, {})
    if "direct-path" in names:
        if mask_token_id is None:
            raise InvalidInputError("without the direct path a mask token fills the block: give its id (mask_token_id)")
        off["mask_token_id"] = mask_token_id
    elif mask_token_id is not None:
        raise InvalidInputError("mask_token_id is for drafters that lose their direct path")
    if drafter.config.confidence_sees_token and "transition-head" in names and "confidence-head" not in names:
        raise UnsupportedError("the confidence head reads the transition head's rows: leave it out as well")
    ids, head = drafter.draft_ids, drafter.own_head
    if PRUNED in names:
        if drafter.config.transition_rank and "transition-head" not in names:
            raise UnsupportedError(
                "the transition head has columns of the pruned vocabulary only: leave it out as well"
            )
        if head is not None:
            raise UnsupportedError("this drafter brings an output head of its own, which has pruned rows only")
        ids = None
    model = DFlashModel(replace(drafter.config, **off))
    theirs = drafter.model.state_dict()
    model.load_state_dict({name: theirs.get(name, tensor) for name, tensor in model.state_dict().items()})
    return DFlashDrafter(model.to(drafter.model.fc.weight.dtype), ids, head, drafter.own_embedding).eval()


def features(drafter: DFlashDrafter) -> list[str]:
    """Names of what a drafter has that can be left out."""
    found = [name for name, off in FEATURES.items() if _has(drafter.config, name, off)]
    return found if drafter.draft_ids is None else [*found, PRUNED]


def _has(config: DFlashConfig, name: str, off: dict[str, Any]) -> bool:
    if name == "sequential-head":
        return config.sequential
    first, value = next(iter(off.items()))
    return bool(getattr(config, first) != value) or (name == "logit-scale" and bool(config.final_logit_softcapping))


def named(left: Sequence[str]) -> tuple[list[str], list[str]]:
    """Features that fields of the settings belong to: those that can be left out, and words for the others."""
    droppable = [name for name, off in FEATURES.items() if any(field in off for field in left)]
    covered = {field for name in droppable for field in FEATURES[name]}
    fixed = [words for words, names in _FIXED.items() if any(field in names for field in left)]
    covered |= {field for names in _FIXED.values() for field in names}
    return droppable, fixed + [field for field in left if field not in covered]
