"""Where the development data lies, if this checkout has it. It is no part of the project; it only widens some tests."""

from __future__ import annotations

import os
from pathlib import Path


def dev_data() -> Path | None:
    """The development data's folder: ``SPECDIFF_DEV_DATA``, else ``shared/data`` beside the checkout, else None.

    A checkout in a subfolder finds it as well: every parent folder is tried.
    """
    named = os.environ.get("SPECDIFF_DEV_DATA")
    if named:
        return Path(named) if Path(named).is_dir() else None
    for folder in Path(__file__).resolve().parents[1:]:
        candidate = folder / "shared" / "data"
        if candidate.is_dir():
            return candidate
    return None
