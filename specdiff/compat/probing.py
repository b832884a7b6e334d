"""Would a model be served? Asked of its configuration alone, on a tiny random model of the same shape."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from specdiff.cache.states import Serving
from specdiff.compat.tiny import text_part, tiny_config, tiny_model
from specdiff.errors import UnsupportedError
from specdiff.target import Target


def probe_configuration(config: PreTrainedConfig) -> tuple[Serving | None, str | None]:
    """How a model of this configuration would be served, without its weights.

    Args:
        config: of a real model; it is shrunk by the rules of the families table.

    Returns:
        The way of serving and None; or None and why it would be refused. Both None where the rules give no tiny model:
        then only the model itself can tell.
    """
    part = text_part(config)
    known = [each for each in (part, config) if type(each) in MODEL_FOR_CAUSAL_LM_MAPPING]
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(known[0])] if known else None
    if cls is None:
        return None, f"transformers has no causal LM for {type(config).__name__}"
    try:
        model = tiny_model(tiny_config(config), cls)
    except Exception:  # a configuration that the rules do not fit
        return None, None
    try:
        return Target(model).serving, None
    except UnsupportedError as error:
        return None, str(error)
