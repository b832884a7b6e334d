"""Progress of the first start: bars on a terminal, a few short log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger("specdiff.hub")


def _say(message: str) -> None:
    """A log line; shown on standard error when the program has set up no logging of its own."""
    if logger.hasHandlers():
        logger.info(message)
    else:
        print(f"specdiff: {message}", file=sys.stderr, flush=True)


@contextmanager
def watch_bytes(label: str, total: int, measure: Callable[[], int], every: float = 0.2) -> Iterator[None]:
    """Show a bar that follows ``measure()`` (bytes so far) while the block runs."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        _say(f"{label} ({total / 1e6:.0f} MB)")
        yield
        return
    done = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)

        def follow() -> None:
            while not done.wait(every):
                progress.update(task, completed=min(total, measure()))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """Show that something of unknown length is going on."""
    console = Console(file=sys.stderr)
    began = time.monotonic()
    if not console.is_terminal:
        _say(label)
        yield
        _say(f"done in {time.monotonic() - began:.0f} s")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(label, total=None)
        yield
