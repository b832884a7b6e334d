"""Shared fixtures, and the rule that a test may only skip if it is on the list."""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # several workers, each with threads for all cores, would wait for one another most of the time
    share = max(1, (os.cpu_count() or 1) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    torch.set_num_threads(share)

STRICT = bool(os.environ.get("SPECDIFF_STRICT_SKIPS"))
_unlisted: list[str] = []

SLOW_SECONDS = float(os.environ.get("SPECDIFF_SLOW_SECONDS", "inf"))
"""Slow tests that would start later than this are left out, and counted as such: CI has an end."""
_began = time.monotonic()
_late: list[str] = []
OUT_OF_TIME = "no time left for slow tests"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and time.monotonic() - _began > SLOW_SECONDS:
        _late.append(item.nodeid)
        pytest.skip(OUT_OF_TIME)


def allowed_skips() -> list[str]:
    """Patterns of ``allowed_skips.txt``: one test id (``*`` allowed) a line, the reason behind ``#``."""
    lines = (TESTS / "allowed_skips.txt").read_text(encoding="utf-8").splitlines()
    return [pattern for line in lines if (pattern := line.split("#")[0].strip())]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _note_skip(report.nodeid, str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note_skip(report.nodeid, str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""))


def _note_skip(nodeid: str, reason: str) -> None:
    if OUT_OF_TIME in reason:
        return
    if not any(fnmatchcase(nodeid, pattern) for pattern in allowed_skips()):
        _unlisted.append(f"{nodeid}: {reason}")


def pytest_terminal_summary(terminalreporter) -> None:
    if _late:
        terminalreporter.section(f"{OUT_OF_TIME} after {SLOW_SECONDS:.0f} s: {len(_late)} left out")
        for nodeid in _late:
            terminalreporter.line(nodeid)
    if STRICT and _unlisted:
        terminalreporter.section("skipped, but not in tests/allowed_skips.txt")
        for line in _unlisted:
            terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """A worker of pytest-xdist tells its skipped modules: only skipped tests reach the controller by themselves."""
    for line in getattr(node, "workeroutput", {}).get("unlisted", []):
        if line not in _unlisted:
            _unlisted.append(line)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["unlisted"] = _unlisted
        return
    if STRICT and _unlisted and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def model_pair():
    """The offline default target (float32) and its tokenizer. Tests must not alter either."""
    from specdiff import load_target
    from specdiff.errors import DownloadError

    try:
        return load_target()
    except DownloadError as error:
        pytest.skip(f"the offline default model cannot be loaded: {error}")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random two-layer Llama with tokenizer and chat template, in a folder that ``from_pretrained`` reads."""
    from fakewheel import write_gguf

    from specdiff.hub.convert import convert_gguf

    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "tiny.gguf")
    (folder / "model").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "model", name="tiny", card="A random model for tests.\n")
    return folder / "model"
