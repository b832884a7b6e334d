"""The DFlash 2 layout (``DFlash2DraftModel``): z-lab's, with convolutions in the layers and a candidate selector.

Some runners store the selector's codebooks as ``*.weight``; on disk they are bare, and both are read.
"""

from __future__ import annotations

from typing import Any

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.formats import zlab
from specdiff.drafters.formats.layout import Layout, TargetShape, Values, build
from specdiff.errors import FormatError

ARCHITECTURE = "DFlash2DraftModel"
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def recognises(values: dict[str, Any]) -> bool:
    """By architecture."""
    return ARCHITECTURE in (values.get("architectures") or ()) and not values.get("speculators_model_type")


def settings(values: dict[str, Any], target: TargetShape | None = None) -> DFlashConfig:
    """Settings; see :func:`specdiff.drafters.formats.zlab.settings`."""
    found = Values(values.get("dflash_config"), values)
    return build(**zlab.shared(values, target) | additions(found) | zlab.own(values))


def additions(found: Values) -> dict[str, Any]:
    """What DFlash 2 adds to the settings.

    Raises:
        FormatError: a size is missing or none: such a checkpoint has both convolutions and a selector.
    """
    sizes = {
        "conv_kernel": int(found.get("conv_kernel_size")),
        "conv_group": int(found.get("conv_group_size")),
        "selector_rank": int(found.get("selector_rank")),
        "selector_top_k": int(found.get("selector_top_k")),
    }
    if min(sizes.values()) < 1:
        raise FormatError(
            f"a DFlash 2 drafter has convolutions and a candidate selector; these sizes say otherwise: {sizes}"
        )
    return sizes


def addition_values(config: DFlashConfig) -> dict[str, Any]:
    """The inverse of :func:`additions`."""
    return {
        "conv_kernel_size": config.conv_kernel,
        "conv_group_size": config.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }


def values(config: DFlashConfig, target: TargetShape) -> dict[str, Any]:
    """``config.json``."""
    out = zlab.values(config, target) | {"architectures": [ARCHITECTURE]}
    out["dflash_config"] |= addition_values(config)
    return out


ALIASES = tuple((f"{name}.weight", name) for name in _CODEBOOKS)
LAYOUT = Layout("dflash2", recognises, settings, values, aliases=ALIASES)
