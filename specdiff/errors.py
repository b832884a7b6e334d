"""The exception classes of specdiff. All derive from :class:`SpecDiffError`."""

from __future__ import annotations


class SpecDiffError(Exception):
    """Base class of every error that specdiff raises on purpose."""


class UnsupportedError(SpecDiffError, ValueError):
    """A model, argument or feature that specdiff cannot serve right. The message names it and says what to do."""


class InvalidInputError(SpecDiffError, ValueError):
    """Arguments that contradict each other or lie outside their range."""


class NumericalError(SpecDiffError, RuntimeError):
    """The target produced NaN, +inf, or a row without any finite logit. Names the row and the step."""


class DownloadError(SpecDiffError, OSError):
    """The offline default model could not be fetched, or what was fetched is damaged."""


class FormatError(SpecDiffError, ValueError):
    """A checkpoint whose layout, shapes or ids are not what its format says."""
