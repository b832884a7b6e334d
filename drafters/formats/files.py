"""Folders with ``config.json`` and safetensors, whole or in shards."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdiff.errors import FormatError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def read_values(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder.

    Raises:
        FormatError: there is none, or it is no JSON object.
    """
    if not (folder / CONFIG).exists():
        raise FormatError(f"{folder}: no {CONFIG}, so no drafter")
    try:
        values = json.loads((folder / CONFIG).read_text())
    except json.JSONDecodeError as error:
        raise FormatError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(f"{folder / CONFIG} does not hold an object")
    return values


def tensor_files(folder: Path) -> list[Path]:
    """The files that hold the tensors: ``model.safetensors``, or what the index names.

    Raises:
        FormatError: one is missing.
    """
    names = [WHOLE]
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    for name in names:
        if not (folder / name).exists():
            raise FormatError(f"{folder}: {name} is missing")
    return [folder / name for name in names]


def tensor_names(folder: Path) -> set[str]:
    """Names of a folder's tensors; none for a folder that holds the configuration only."""
    if not list(folder.glob("*.safetensors")):
        return set()
    names: set[str] = set()
    for file in tensor_files(folder):
        with safe_open(file, framework="pt") as handle:
            names |= set(handle.keys())
    return names


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder.

    Raises:
        FormatError: a file is missing.
    """
    tensors: dict[str, Tensor] = {}
    for file in tensor_files(folder):
        with safe_open(file, framework="pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return tensors


def write(folder: Path, values: dict[str, Any], tensors: dict[str, Tensor], max_shard_bytes: int = 2**40) -> None:
    """Write a checkpoint; an older one in the folder is replaced, other files stay.

    Args:
        folder: created if needed.
        values: of ``config.json``.
        tensors: by name on disk.
        max_shard_bytes: largest file; more than one file gets the usual index.
    """
    scratch = folder / ".writing"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        save_file(tensors, scratch / WHOLE, metadata={"format": "pt"})
    else:
        where = {}
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, scratch / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(shard, file))
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (scratch / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (scratch / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    fresh = sorted(scratch.iterdir())
    stale = [f for f in folder.iterdir() if f.name in (WHOLE, INDEX) or SHARD.fullmatch(f.name)]
    for old in stale:
        if not (scratch / old.name).exists():
            old.unlink()
    for part in fresh:  # only now, when all of it is written, does anything replace what was there
        part.replace(folder / part.name)
    scratch.rmdir()


def _split(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Greedy split into dictionaries of at most ``limit`` bytes (a single larger tensor stands alone)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        weight = tensor.numel() * tensor.element_size()
        if shards[-1] and size + weight > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += weight
    return shards
