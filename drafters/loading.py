"""One door to every drafter: ``"lookup"``, a name of the zoo, a folder, a hub repository, a dual-mode adapter."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from specdiff.drafters import dual
from specdiff.drafters.base import Drafter
from specdiff.drafters.combined import CombinedDrafter
from specdiff.drafters.lookup import PromptLookup
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError

ZOO = Path(__file__).parent / "zoo"
WITH_LOOKUP = "+lookup"


def zoo() -> list[str]:
    """Names of the drafters that ship with the package."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json"))


def load(path_or_zoo_name: str | PathLike[str], target: Any = None, **options: Any) -> Drafter:
    """Load a drafter and bind it to ``target``.

    Args:
        path_or_zoo_name: ``"lookup"``; a name of the zoo (:func:`zoo`); a folder; or a hub repository id. Any but the
            first may end in ``"+lookup"``: prompt lookup then drafts where its match promises more.
        target: the Hugging Face causal LM that it will draft for.
        options: of :func:`specdiff.drafters.saving.load` (``dtype``, ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``).

    Raises:
        UnsupportedError: no target was given, or the drafter does not fit it.
        FormatError: the checkpoint is not what its format says, or nothing of this name is found.
    """
    name = fspath(path_or_zoo_name)
    if name == "lookup":
        return PromptLookup()
    if name.endswith(WITH_LOOKUP):
        return CombinedDrafter(load(name[: -len(WITH_LOOKUP)], target, **options))
    adapter = dual.find(name)
    if adapter is not None:
        return dual.own_drafter(adapter, target, options)
    where = locate(name)
    if target is None:
        raise UnsupportedError(f"the drafter {name!r} reads its target's embedding and head: pass target=")
    from specdiff.drafters.dflash import DFlashDrafter

    return DFlashDrafter.from_pretrained(where, target, **options)


def locate(name: str) -> Path | str:
    """Where a drafter with weights lies: a folder of the zoo or of its own, else its hub repository.

    Raises:
        InvalidInputError: prompt lookup has no files.
        FormatError: nothing of this name can be one.
    """
    if name == "lookup" or name.endswith(WITH_LOOKUP):
        raise InvalidInputError(f"{name}: prompt lookup has no weights; name the drafter alone")
    folder = ZOO / name if name in zoo() else Path(name)
    if folder.is_dir():
        return folder
    if name.count("/") != 1:
        raise FormatError(f"no drafter {name!r}: not a folder, not in the zoo ({', '.join(zoo()) or 'empty'})")
    return name
