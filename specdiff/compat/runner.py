"""All architectures, one process each, resumable: results go line by line into a JSONL log, and then into the table."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from specdiff.compat.family import MODES, NEW_TOKENS, FamilyResult, check_family, model_types

logger = logging.getLogger(__name__)

TIME_LIMIT = 900.0
"""Seconds for one architecture, building included."""


def run_families(
    log: Path,
    *,
    names: Iterable[str] | None = None,
    mode: str = "full",
    again: bool = False,
    time_limit: float = TIME_LIMIT,
    report: Callable[[FamilyResult, int, int], None] | None = None,
) -> list[FamilyResult]:
    """Check architectures that the log does not hold yet.

    Args:
        log: JSONL file, one result per line; later lines replace earlier ones of the same architecture, mode and
            versions.
        names: model types, all of the installed transformers when None.
        mode: ``full`` (all 48 combinations), ``reduced`` (twelve pairwise ones) or ``quick`` (four).
        again: run also what the log holds.
        time_limit: seconds per architecture; a process that takes longer is ended and reported as failed.
        report: called after each architecture with its result, how many are done and how many there are.

    Returns:
        One result per architecture, in order.
    """
    wanted = list(model_types() if names is None else names)
    held = {} if again else read_log(log, mode)
    results = []
    for at, name in enumerate(wanted):
        result = held.get(name)
        if result is None:
            result = _in_process(name, mode, at, time_limit)
            append_log(log, mode, result)
        results.append(result)
        if report is not None:
            report(result, at + 1, len(wanted))
    return results


def read_log(log: Path, mode: str) -> dict[str, FamilyResult]:
    """The latest result per architecture for this mode and the installed versions; damaged lines are skipped."""
    results: dict[str, FamilyResult] = {}
    for line in _lines(log):
        if line.get("mode") == mode and line.get("versions") == versions():
            results[line["result"]["model_type"]] = FamilyResult(**line["result"])
    return results


def append_log(log: Path, mode: str, result: FamilyResult) -> None:
    """Add one result."""
    log.parent.mkdir(parents=True, exist_ok=True)
    line = {"mode": mode, "versions": versions(), "time": round(time.time()), "result": result.to_dict()}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def versions() -> dict[str, str]:
    """What results depend on."""
    import torch
    import transformers

    from specdiff import __version__

    return {"specdiff": __version__, "transformers": transformers.__version__, "torch": torch.__version__}


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    if not log.exists():
        return
    for text in log.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # an interrupted write
            continue
        if isinstance(line, dict) and isinstance(line.get("result"), dict):
            yield line


def _in_process(name: str, mode: str, turn: int, time_limit: float) -> FamilyResult:
    """Check one architecture in a process of its own, which may crash or hang without harm."""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(sender, name, mode, turn), daemon=True)
    worker.start()
    sender.close()
    try:
        if receiver.poll(time_limit):
            return FamilyResult(**receiver.recv())
        why = f"took longer than {time_limit:.0f} s"
    except EOFError:
        worker.join(5)
        why = f"its process ended with exit code {worker.exitcode}"
    finally:
        if worker.is_alive():
            worker.terminate()
        worker.join()
        receiver.close()
    return FamilyResult(name, status="failed", why=why)


def _work(sender: Any, name: str, mode: str, turn: int) -> None:
    import warnings

    import torch
    from transformers.utils import logging as library_logging

    warnings.simplefilter("ignore")
    library_logging.set_verbosity_error()
    torch.set_num_threads(1)
    sender.send(check_family(name, MODES[mode](turn), NEW_TOKENS).to_dict())
    sender.close()
