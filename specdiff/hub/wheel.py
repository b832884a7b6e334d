"""Fetching one data file out of a pinned wheel, with pip, checked by SHA-256."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specdiff.errors import DownloadError
from specdiff.hub.progress import watch_bytes
from specdiff.hub.store import sha256

logger = logging.getLogger(__name__)

ATTEMPTS = 3


@dataclass(frozen=True)
class WheelFile:
    """One file inside one exact wheel.

    Attributes:
        project: name on the package index.
        version: exact version.
        wheel_sha256: of the whole wheel.
        wheel_bytes: its size.
        member: path of the file inside the wheel.
        member_sha256: of the file itself (an already installed package is accepted by it).
    """

    project: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"


def installed(source: WheelFile) -> Path | None:
    """The file inside an installed copy of the package, when it is there and whole. The package is not imported."""
    try:
        distribution = importlib.metadata.distribution(source.project)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.member)))
    if path.is_file() and sha256(path) == source.member_sha256:
        return path
    logger.info("the installed %s has no matching %s; downloading", source.project, source.member)
    return None


def fetch(source: WheelFile, scratch: Path) -> Path:
    """Download the wheel into ``scratch``, check it, unpack the file, delete the wheel; returns the file.

    A download that breaks off, or whose content is not the pinned one, is repeated (without pip's own cache).

    Raises:
        DownloadError: after three attempts, or when this Python has no pip.
    """
    problem = ""
    for attempt in range(ATTEMPTS):
        folder = scratch / f"download-{attempt}"
        try:
            wheel = _download(source, folder, use_cache=attempt == 0)
            found = sha256(wheel)
            if found == source.wheel_sha256:
                return _unpack(source, wheel, scratch)
            problem = f"the downloaded {wheel.name} is damaged (SHA-256 {found}, expected {source.wheel_sha256})"
        except DownloadError as error:
            problem = str(error)
            if not _worth_repeating(problem):
                break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if attempt + 1 < ATTEMPTS:
            logger.warning("%s; trying again", problem)
    raise DownloadError(
        f"could not fetch {source.requirement}: {problem}. With a network and a package index that pip can reach, run "
        f"`{Path(sys.executable).name} -m pip install --no-deps {source.requirement}`; specdiff uses that copy. "
        "Or name a model of your own: load_target(path_or_hub_id), --target on the command line"
    )


def _worth_repeating(problem: str) -> bool:
    return "No module named pip" not in problem and "No matching distribution" not in problem


def _download(source: WheelFile, folder: Path, use_cache: bool) -> Path:
    """Run pip; its temporary files lie in ``folder`` too, so that progress can be seen and nothing is left behind."""
    folder.mkdir(parents=True)
    target, temporary = folder / "wheel", folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(target), source.requirement]
    if not use_cache:
        command.append("--no-cache-dir")
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with watch_bytes(f"downloading {source.requirement}", source.wheel_bytes, lambda: _bytes_below(folder)):
        pip = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = pip.communicate()
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if pip.returncode or len(wheels) != 1:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise DownloadError(f"pip failed with exit code {pip.returncode}: {errors[-1]}")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _unpack(source: WheelFile, wheel: Path, scratch: Path) -> Path:
    path = scratch / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    if sha256(path) != source.member_sha256:
        raise DownloadError(f"{source.member} inside {wheel.name} is not the file that was expected")
    return path
