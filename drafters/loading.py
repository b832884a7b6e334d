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
DOWNLOADS = ("cache_dir", "local_files_only", "token")
"""Options about downloads that hold as well where nothing is downloaded."""


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
            ``local_files_only``). What is no hub repository has no ``revision``; prompt lookup and adapters have no
            ``dtype``.

    Raises:
        InvalidInputError: an option that what is named does not have.
        UnsupportedError: no target was given, or the drafter does not fit it.
        FormatError: the checkpoint is not what its format says, or nothing of this name is found.
    """
    name = fspath(path_or_zoo_name)
    if name == "lookup":
        _refuse_others("prompt lookup", options, DOWNLOADS)
        return PromptLookup()
    if name.endswith(WITH_LOOKUP):
        return CombinedDrafter(load(name[: -len(WITH_LOOKUP)], target, **options))
    adapter = dual.find(name)
    if adapter is not None:
        _refuse_others("a dual-mode adapter, which follows its target,", options, DOWNLOADS)
        return dual.own_drafter(adapter, target)
    where = locate(name)
    if isinstance(where, Path):
        _refuse_others("a drafter in a folder", options, ("dtype", *DOWNLOADS))
    else:
        _refuse_others("a drafter of the hub", options, ("dtype", "revision", *DOWNLOADS))
    if target is None:
        raise UnsupportedError(f"the drafter {name!r} reads its target's embedding and head: pass target=")
    from specdiff.drafters.dflash import DFlashDrafter

    return DFlashDrafter.from_pretrained(where, target, **options)


def _refuse_others(what: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    wrong = sorted(k for k, v in options.items() if k not in known and (k, v) != ("revision", None))
    if wrong:
        raise InvalidInputError(f"{what} has no option {', '.join(wrong)}; it takes {', '.join(sorted(known))}")


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
