"""A program on a pseudo-terminal: what it shows, what one types, Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence

PATIENCE = 900.0
"""Seconds after which a silent program counts as hung, also on a very busy machine."""


class Terminal:
    """Runs ``python -m specdiff ARGUMENTS`` on a terminal of its own.

    Args:
        arguments: of the command.
        **environment: variables to set.
    """

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self.shown = ""
        self._mark = 0
        ours, theirs = pty.openpty()
        self._fd = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specdiff", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)

    def expect(self, text: str, timeout: float = PATIENCE) -> str:
        """Wait until ``text`` is shown after what was expected before; returns what was shown up to its end."""
        end = time.monotonic() + timeout
        while text not in self.shown[self._mark :]:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} was not shown; shown was:\n{self.shown[self._mark :]}")
        start = self._mark
        self._mark = self.shown.index(text, start) + len(text)
        return self.shown[start : self._mark]

    def wait_for_more(self, timeout: float = PATIENCE) -> None:
        """Wait until anything more is shown."""
        before = len(self.shown)
        end = time.monotonic() + timeout
        while len(self.shown) == before:
            assert self._read(end - time.monotonic()), f"nothing more was shown after:\n{self.shown}"

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._fd, (text + "\n").encode())

    def key(self, code: int) -> None:
        """Press a control key: 3 is Ctrl-C, 4 is Ctrl-D."""
        os.write(self._fd, bytes([code]))

    def close(self, timeout: float = PATIENCE) -> int:
        """Wait for the program's end; returns its exit code."""
        end = time.monotonic() + timeout
        while self._read(end - time.monotonic()):
            pass
        try:
            return self._process.wait(max(1.0, end - time.monotonic()))
        finally:
            if self._process.poll() is None:
                self._process.kill()
            os.close(self._fd)

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, timeout))
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other side is gone
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


def _own_terminal() -> None:
    """Make the pseudo-terminal the controlling one, and let Ctrl-C through even where the tests run ignoring it."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
