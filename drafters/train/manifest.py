"""What the text and the features of a run folder were made from, so that they are never taken for something else's."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdiff.drafters.train import speed
from specdiff.drafters.train.build import BY_SLOT
from specdiff.errors import InvalidInputError

FILE = "data.json"
_SAMPLES = 1024


def target_key(target: Any) -> str:
    """A short name for a model: its width, depth and vocabulary, and some values of its embedding and last norms."""
    text = target.config.get_text_config()
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((text.model_type, text.vocab_size, text.hidden_size, text.num_hidden_layers)).encode())
    for parameter in list(target.parameters())[:1] + list(target.parameters())[-4:]:
        flat = parameter.detach().reshape(-1)
        digest.update(
            flat[:: max(1, flat.numel() // _SAMPLES)].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        )
    return digest.hexdigest()


def text_key(texts: Sequence[Any]) -> str:
    """A short name for texts."""
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


def weights_key(model: nn.Module) -> str:
    """A short name for the weights of a drafter that is trained further."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        if name in BY_SLOT:  # another block size is another shape, which checkpoints tell themselves
            continue
        flat = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLES)]
        digest.update(name.encode() + flat.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def claim(
    folder: Path,
    target: str,
    recipe: Mapping[str, Any],
    prompts: Sequence[tuple[str, str]],
    fresh: bool,
    training: Mapping[str, str] | None = None,
) -> None:
    """Take a run folder for this target and these prompts; what it holds of others is removed, or refused.

    Args:
        folder: of the run.
        target: of :func:`target_key`.
        recipe: how text is generated from the prompts.
        prompts: (text, source); none where only finished shards are trained on.
        fresh: remove what belongs to other options instead of refusing, and any training.
        training: option to value: what a checkpoint follows from beside its shape. Free while there is no checkpoint,
            and folders that say nothing of an option are not asked for it.

    Raises:
        InvalidInputError: the folder holds text or features of another target, recipe or prompts, or the training of
            other options.
    """
    if fresh:
        for name in ("checkpoint", "checkpoint.old", "checkpoint.tmp"):
            shutil.rmtree(folder / name, ignore_errors=True)
    mine: dict[str, Any] = {
        "target": target,
        "recipe": json.loads(json.dumps(recipe)) if prompts else None,
        "prompts": text_key(list(map(list, prompts))) if prompts else None,
    }
    file = folder / FILE
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else mine
    differ = [key for key in mine if mine[key] is not None and held.get(key) not in (None, mine[key])]
    if differ and not fresh:
        what = ", ".join(differ)
        if "recipe" in differ:
            names = [key for key in mine["recipe"] if mine["recipe"][key] != held["recipe"].get(key)]
            what = what.replace("recipe", "recipe (" + ", ".join(names) + ")")
        raise InvalidInputError(
            f"{folder} holds text made with another {what}: continue it with the same options, remove that text with "
            "--fresh, or choose another --out"
        )
    begun = dict(held.get("training") or {}) if has_checkpoint(folder) else {}
    options = dict(training or {})
    other = [option for option, value in options.items() if begun.get(option, value) != value]
    if other:
        raise InvalidInputError(
            f"{folder} holds a training begun with another {', '.join(other)}: continue it with the same, begin anew "
            "with --fresh, or choose another --out"
        )
    if differ:
        for name in ("corpus", "features") if "target" in differ else ("corpus",):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / speed.FILE).unlink(missing_ok=True)
    kept = {} if differ else {key: value for key, value in held.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**mine, **kept, "training": {**options, **begun}}, indent=1) + "\n")


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds a training that can go on."""
    return any((folder / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))
