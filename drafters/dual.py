"""Dual-mode adapters as drafters: the target drafts for itself with low-rank weights of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdiff.diffusion.dual import CONFIG
from specdiff.drafters.base import Drafter
from specdiff.errors import UnsupportedError

ZOO = Path(__file__).parent / "zoo"


def adapters() -> dict[str, Path]:
    """Names and folders of the dual-mode adapters that ship with the package."""
    return {path.parent.name: path.parent for path in sorted(ZOO.glob(f"*/{CONFIG}"))}


def find(name: str) -> Path | None:
    """Folder of the dual-mode adapter of this name or path; None if there is none."""
    folder = adapters().get(name, Path(name))
    return folder if (folder / CONFIG).is_file() else None


def own_drafter(folder: Path, target: Any) -> Drafter:
    """The drafter that ``target`` becomes with an adapter; parameters are shared, the target is not altered.

    Raises:
        UnsupportedError: no target was given.
    """
    if target is None:
        raise UnsupportedError(f"the adapter {folder.name!r} is made of its target: pass target=")
    from specdiff.diffusion.lm import DiffusionLM

    drafter: Drafter = DiffusionLM.from_adapter(target, str(folder)).drafter()
    return drafter
