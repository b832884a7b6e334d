"""How far a long command has come, on standard error: on a terminal one line, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

EVERY = 30.0
"""Seconds between lines where there is no terminal."""


def teller(every: float = EVERY) -> Callable[[str, int, int], None]:
    """``tell(what, done, total)``, to be called often."""
    if sys.stderr.isatty():
        return _on_terminal
    last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return tell


def _on_terminal(what: str, done: int, total: int) -> None:
    end = "" if done < total else "\r\x1b[K"
    print(f"\r\x1b[K{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)
