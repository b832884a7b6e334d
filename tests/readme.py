"""The set-up commands that README.md gives, for the tests and for ``.ci/run``.

Run as a script it prints one: ``python tests/readme.py demo`` or ``tests``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
SETUP = "python3 -m venv"


def setup_commands(text: str | None = None) -> dict[str, str]:
    """The lines of README's shell blocks that make an environment: ``{"demo": ..., "tests": ...}``.

    Raises:
        ValueError: there are not exactly two, or they are not for the demo and for the tests.
    """
    text = README.read_text(encoding="utf-8") if text is None else text
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith(SETUP)]
    found = {
        "demo" if line.endswith("specdiff demo") else "tests" if "pytest" in line else line: line for line in lines
    }
    if len(lines) != 2 or set(found) != {"demo", "tests"}:
        raise ValueError(f"README.md must hold two set-up commands, one for the demo and one for the tests: {lines}")
    return found


if __name__ == "__main__":
    print(setup_commands()[sys.argv[1]])
