"""Drafters on disk and on the hub: specdiff's own files are the z-lab layout (see ``specdiff.drafters.formats``).

Weights are safetensors, sharded on request; a pruned vocabulary is the integer tensor ``draft_ids``. Nothing that
belongs to the target (embedding, head) is ever written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats import files, own_values, read
from specdiff.errors import InvalidInputError


def save(
    drafter: DFlashDrafter,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2**40,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    **hub: Any,
) -> None:
    """Write a drafter.

    Args:
        drafter: bound or not.
        folder: created if needed; an older drafter in it is replaced.
        dtype: of the weights on disk (default: as they are).
        max_shard_bytes: largest file; more than one file gets the usual index.
        push_to_hub: upload afterwards, to ``repo_id`` (default: the folder's name), with the ``hub`` options of
            :func:`push`.
        repo_id: see ``push_to_hub``.
        hub: see ``push_to_hub``.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in drafter.model.state_dict().items():
        tensors[name] = value.to(dtype or value.dtype)
    if drafter.draft_ids is not None:
        tensors["draft_ids"] = drafter.draft_ids.int()
    for name, own in (("head", drafter.own_head), ("embedding", drafter.own_embedding)):
        if own is not None:
            tensors[f"options.own_{name}"] = own
    files.write(folder, own_values(drafter.config), tensors, max_shard_bytes)
    if push_to_hub:
        push_folder(folder, repo_id or folder.name, **hub)


def load(
    name_or_path: str | Path,
    *,
    target: Any = None,
    dtype: torch.dtype | None = torch.float32,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> DFlashDrafter:
    """Load an unbound drafter from a folder or a hub repository.

    Args:
        name_or_path: a folder, else a repository id.
        target: whose shape is read, for layouts that do not hold it; the drafter is not bound to it.
        dtype: to compute in; None keeps what is on disk.
        revision: of the repository.
        token: for private repositories.
        cache_dir: of the hub's files.
        local_files_only: never go to the network (``HF_HUB_OFFLINE`` does the same).

    Raises:
        InvalidInputError: a revision of a folder, which has none.
        FormatError: no layout that specdiff reads, or tensors are missing, left over, or of the wrong shape.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        if revision is not None:
            raise InvalidInputError(f"{folder} is a folder and has no revision {revision!r}: leave the revision out")
    else:
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                str(name_or_path), revision=revision, token=token, cache_dir=cache_dir,
                local_files_only=local_files_only, allow_patterns=["*.json", "*.safetensors"],
            )
        )  # fmt: skip
    return read(folder, target, dtype)


def push(drafter: DFlashDrafter, repo_id: str, **options: Any) -> str:
    """Save to a temporary folder and upload it; returns the address of the commit."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        save(drafter, Path(scratch))
        return push_folder(Path(scratch), repo_id, **options)


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload drafter",
) -> str:
    """Upload a drafter folder to the hub, creating the repository if needed."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    done = api.upload_folder(folder_path=folder, repo_id=repo, revision=revision, commit_message=commit_message)
    return str(done.commit_url)
