"""Writing a drafter for other programs. What the layout cannot hold is refused, or left out when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import LAYOUTS, differing, files, muse
from specdiff.drafters.formats.features import PRUNED, features, named, without
from specdiff.drafters.formats.layout import Layout, TargetShape, shape_of
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError


def export(
    drafter: DFlashDrafter,
    folder: Path,
    to: str,
    *,
    target: Any = None,
    leave_out: Sequence[str] = (),
    mask_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    transformers: str | None = None,
) -> DFlashDrafter:
    """Write ``drafter`` in a layout.

    Args:
        drafter: unchanged.
        folder: created if needed; a checkpoint in it is replaced.
        to: name of a layout, see :data:`specdiff.drafters.formats.LAYOUTS`.
        target: the model it drafts for; the layout may name it, and hold its output rows of a pruned vocabulary.
        leave_out: features to export without, see :mod:`specdiff.drafters.formats.features`.
        mask_token_id: see there.
        dtype: of the weights on disk (default: as they are).
        transformers: version of transformers that will run it, for the layout "muse" (default: the newest known).

    Returns:
        Exactly what the export holds, bound to ``target`` if there is one.

    Raises:
        UnsupportedError: the drafter has something that the layout cannot hold.
        InvalidInputError: arguments that make no sense, for this layout or at all.
    """
    if to not in LAYOUTS:
        raise InvalidInputError(f"unknown layout {to!r}; known: {', '.join(sorted(LAYOUTS))}")
    if transformers is not None and to != "muse":
        raise InvalidInputError("a version of transformers matters for the layout 'muse' only")
    layout = LAYOUTS[to]
    plain = without(drafter, leave_out, mask_token_id)
    shape = _shape(plain, target)
    values = _values(layout, plain, shape)
    if target is not None:
        plain.bind(target)
    tensors = {layout.theirs(name): tensor for name, tensor in plain.model.state_dict().items()}
    tensors |= _own(layout, plain, values)
    if to == "muse" and transformers is not None:
        values = muse.for_version(values, transformers)
    cast = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors.items()}
    kept = next(t.dtype for t in cast.values() if t.is_floating_point())
    files.write(folder, values | {"dtype": str(kept).removeprefix("torch.")}, cast)
    return plain


def _shape(drafter: DFlashDrafter, target: Any) -> TargetShape:
    config = drafter.config
    if target is None:
        return TargetShape(config.num_target_layers, config.vocab_size)
    return replace(shape_of(target), layers=config.num_target_layers, vocab=config.vocab_size)


def _values(layout: Layout, drafter: DFlashDrafter, shape: TargetShape) -> dict[str, Any]:
    """``config.json``; refuses what would not be read back."""
    config, left = drafter.config, []
    if config.direct:
        left, config = ["direct"], replace(config, direct=False, mask_token_id=config.mask_token_id or 0)
    try:
        values = layout.values(config, shape)
        left += list(differing(config, layout.settings(values, shape)))
    except FormatError as error:
        raise UnsupportedError(f"the {layout.name} layout cannot hold this drafter: {error}") from error
    droppable, fixed = named(left)
    if drafter.draft_ids is not None and not layout.own_weights:
        droppable.append(PRUNED)
    if (drafter.own_head is not None or drafter.own_embedding is not None) and not layout.own_weights:
        fixed.append("output head or embedding of its own")
    if droppable or fixed:
        advice = ""
        if droppable and not fixed:
            missing = [name for name in features(drafter) if name in droppable]
            advice = "; export without: " + " ".join(f"--without {name}" for name in missing)
        raise UnsupportedError(f"the {layout.name} layout cannot hold: {', '.join(droppable + fixed)}{advice}")
    return values


def _own(layout: Layout, drafter: DFlashDrafter, values: dict[str, Any]) -> dict[str, Tensor]:
    """Vocabulary maps, head and embedding, in layouts that have them; the size of the vocabulary is noted in
    ``values``."""
    if not layout.own_weights:
        return {}
    out: dict[str, Tensor] = {}
    if drafter.own_embedding is not None:
        out["embed_tokens.weight"] = drafter.own_embedding
    if drafter.own_head is not None:
        out["lm_head.weight"] = drafter.own_head
    ids = drafter.draft_ids
    if ids is None:
        return out
    if "lm_head.weight" not in out:
        if not drafter.bound:
            raise InvalidInputError(
                f"the {layout.name} layout holds the output rows of the draft vocabulary: give target="
            )
        out["lm_head.weight"] = drafter.head
    values["draft_vocab_size"] = len(ids)
    out["d2t"] = ids - torch.arange(len(ids), device=ids.device)
    out["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
    return out
