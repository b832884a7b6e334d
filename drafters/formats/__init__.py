"""Checkpoint layouts of drafters, one file each, and reading any of them.

specdiff's own files are the z-lab layout; what that cannot hold stands under ``specdiff`` in ``config.json`` and in
parameters of other names, so a plain drafter saved by specdiff is a plain z-lab checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.formats import dflash2, dspark, muse, speculators, zlab
from specdiff.drafters.formats.files import read_tensors, read_values
from specdiff.drafters.formats.layout import Layout, TargetShape, shape_of
from specdiff.errors import FormatError, InvalidInputError

LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout for layout in (speculators.LAYOUT, muse.LAYOUT, dspark.LAYOUT, dflash2.LAYOUT, zlab.LAYOUT)
}
"""By name. The first that recognises a checkpoint reads it."""

_TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight", "mask_embedding")
"""Tensors of the speculators layout that drafting does not use."""


def layout_of(values: dict[str, Any]) -> Layout:
    """The layout of a ``config.json``.

    Raises:
        FormatError: none that specdiff reads.
    """
    for layout in LAYOUTS.values():
        if layout.recognises(values):
            return layout
    kind = values.get("architectures") or values.get("model_type") or "no architecture"
    raise FormatError(f"config.json describes {kind}, which is no drafter layout that specdiff reads")


def differing(config: DFlashConfig, other: DFlashConfig) -> dict[str, Any]:
    """Fields of ``config`` that ``other`` has otherwise."""
    names = [f.name for f in fields(DFlashConfig)]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(other, name)}


def own_values(config: DFlashConfig) -> dict[str, Any]:
    """``config.json`` as specdiff writes it for itself: z-lab's (or DFlash 2's), the rest under ``specdiff``."""
    layout = dflash2.LAYOUT if config.conv_kernel and config.selector_rank else zlab.LAYOUT
    shape = TargetShape(config.num_target_layers, config.vocab_size)
    # what the layout cannot do without (a mask token of a direct drafter) must not keep it from being read back
    standing = replace(config, direct=False, mask_token_id=config.mask_token_id or 0)
    values = layout.values(config, shape)
    left = differing(config, layout.settings(layout.values(standing, shape), shape))
    if config.mask_token_id is None:
        left.pop("mask_token_id", None)
    if left:
        values["specdiff"] = {name: list(v) if isinstance(v, tuple) else v for name, v in left.items()}
    return values


def read(folder: Path, target: Any = None, dtype: torch.dtype | None = torch.float32) -> DFlashDrafter:
    """An unbound drafter from a folder of any layout.

    Args:
        folder: with ``config.json`` and safetensors.
        target: the model it will draft for; only its shape is read. Some layouts do not hold it.
        dtype: to compute in; None keeps what is on disk.

    Raises:
        FormatError: no such layout, or tensors are missing, left over, or of the wrong shape.
    """
    values = read_values(folder)
    layout = layout_of(values)
    if (folder / "mask_embedding.pt").exists():
        raise FormatError(f"{folder}: mask_embedding.pt is a pickled mask embedding; only safetensors are read")
    config = layout.settings(values, None if target is None else shape_of(target))
    tensors = {layout.ours(name): tensor for name, tensor in read_tensors(folder).items()}
    draft_ids = tensors.pop("draft_ids", None)
    own = {name: tensors.pop(f"options.own_{name}", None) for name in ("head", "embedding")}
    if layout.own_weights:
        own = {"head": tensors.pop("lm_head.weight", None), "embedding": tensors.pop("embed_tokens.weight", None)}
        maps = tensors.pop("d2t", None), tensors.pop("t2d", None)
        draft_ids = pruned_ids(*maps, int(values.get("draft_vocab_size") or config.vocab_size), config.vocab_size)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in _TARGETS_OWN}
    model = DFlashModel(config)
    fit(model, tensors, folder)
    stored = next(iter(tensors.values())).dtype
    model.to(dtype or stored)
    try:
        return DFlashDrafter(model, draft_ids, own["head"], own["embedding"]).eval()
    except InvalidInputError as error:
        raise FormatError(f"{folder}: {error}") from error


def pruned_ids(d2t: Tensor | None, t2d: Tensor | None, columns: int, vocab: int) -> Tensor | None:
    """Draft ids of the two maps; None for the whole vocabulary.

    Raises:
        FormatError: the maps are missing, contradict each other, or do not have the declared size.
    """
    if d2t is None:
        if columns < vocab:
            raise FormatError(f"config.json declares {columns} of {vocab} draft ids, but there is no d2t map")
        return None
    if len(d2t) != columns:
        raise FormatError(f"d2t has {len(d2t)} entries, draft_vocab_size is {columns}")
    ids = torch.arange(len(d2t)) + d2t.long()
    if t2d is not None and (len(t2d) != vocab or not torch.equal(t2d.bool().nonzero()[:, 0], ids)):
        raise FormatError("t2d and d2t do not name the same draft ids in ascending order")
    return None if columns == vocab and torch.equal(ids, torch.arange(vocab)) else ids


def fit(model: DFlashModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put tensors into a model.

    Raises:
        FormatError: tensors are missing, left over, or of the wrong shape.
    """
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or extra:
        raise FormatError(f"{folder}: weights do not fit config.json; missing {missing[:4]}, left over {extra[:4]}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise FormatError(f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
    model.load_state_dict(tensors)
