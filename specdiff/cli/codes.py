"""Exit codes, and which error means which."""

from __future__ import annotations

from specdiff.errors import FormatError, InvalidInputError, SpecDiffError, UnsupportedError

OK = 0
FAILED = 1
"""A check failed, or something that should work went wrong (network, disk, numbers)."""
USAGE = 2
"""Arguments that make no sense."""
UNSUPPORTED = 3
"""A model, drafter or option that specdiff cannot serve."""
INTERRUPTED = 130
"""Ctrl-C."""
PIPE = 141
"""The reader of a pipe went away."""


def code_of(error: Exception) -> int | None:
    """Exit code of an error that a user can act on; None for one that is a fault and deserves its traceback."""
    if isinstance(error, (UnsupportedError, FormatError)):
        return UNSUPPORTED
    if isinstance(error, InvalidInputError):
        return USAGE
    if isinstance(error, (SpecDiffError, OSError)):
        return FAILED
    return None
