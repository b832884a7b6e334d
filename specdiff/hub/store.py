"""A folder in the user's cache that is either whole or absent: manifest, lock, atomic replacement."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specdiff.errors import DownloadError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """``SPECDIFF_CACHE``, else ``specdiff`` below ``XDG_CACHE_HOME``, else ``~/.cache/specdiff``. Not created here."""
    named = os.environ.get("SPECDIFF_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdiff"


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, recipe: str) -> None:
    """Record name, size and SHA-256 of every file of ``folder``, and the recipe that made them."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps({"recipe": recipe, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def damage(folder: Path, recipe: str) -> str | None:
    """What is wrong with ``folder``, or None when every file is as its manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].items()
        if manifest["recipe"] != recipe:
            return "it was made by another recipe"
        for name, expected in files:
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"] or sha256(path) != expected["sha256"]:
                return f"{name} is damaged"
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; whoever comes second waits, and says so once."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("another process is preparing %s; waiting for it", path.stem)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def ensure_folder(folder: Path, recipe: str, build: Callable[[Path, Path], None], need_bytes: int = 0) -> Path:
    """Return ``folder``, built first if it is missing, damaged or of another recipe.

    Safe against interruption at any point (the folder appears whole, by one rename) and against concurrent starts (one
    process builds, the others wait). What interrupted builds left behind is removed.

    Args:
        folder: final place.
        recipe: name of what ``build`` makes; another recipe in the manifest means a rebuild.
        build: ``build(result, scratch)`` fills the empty folder ``result`` and may use the folder ``scratch``.
        need_bytes: free disk space that a build needs.

    Raises:
        DownloadError: the cache cannot be written, or has too little space.
    """
    if damage(folder, recipe) is None:
        return folder
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(parent / f"{folder.name}.lock")
        with lock:
            return _build_locked(folder, recipe, build, need_bytes)
    except PermissionError as error:
        raise DownloadError(
            f"cannot write to the cache {parent}: {error}; set SPECDIFF_CACHE to a folder that you may write to"
        ) from error


def _build_locked(folder: Path, recipe: str, build: Callable[[Path, Path], None], need_bytes: int) -> Path:
    problem = damage(folder, recipe)
    if problem is None:
        return folder
    parent, prefix = folder.parent, f".{folder.name}-"
    for stale in parent.glob(prefix + "*"):  # the lock is ours: nobody uses these
        shutil.rmtree(stale, ignore_errors=True)
    if folder.exists():
        logger.warning("%s: %s; making it again", folder, problem)
    free = shutil.disk_usage(parent).free
    if free < need_bytes:
        raise DownloadError(
            f"{parent} has {free / 1e6:.0f} MB free, {need_bytes / 1e6:.0f} MB are needed; "
            "make room or set SPECDIFF_CACHE to a folder on another disk"
        )
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        result, scratch = work / "result", work / "scratch"
        result.mkdir()
        scratch.mkdir()
        build(result, scratch)
        write_manifest(result, recipe)
        if folder.exists():
            os.rename(folder, work / "old")
        os.rename(result, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
