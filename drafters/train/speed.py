"""Tokens per second of the stages before training (the training loop keeps its own time)."""

from __future__ import annotations

import json
import time
from pathlib import Path

FILE = "stages.jsonl"


class Meter:
    """Tokens that this process got through in a stage, and how fast.

    Attributes:
        tokens: so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._began = time.monotonic()
        self._saved = (0, self._began)

    def add(self, tokens: int) -> str:
        """Count tokens; returns what a progress line says."""
        self.tokens += tokens
        return f"{self.tokens} tokens, {self.tokens / max(time.monotonic() - self._began, 1e-9):.0f} tokens/s"

    def save(self, folder: Path, stage: str, rank: int = 0) -> None:
        """Write what was counted since the last call into the run folder's record, so that later runs know it too."""
        tokens, now = self.tokens - self._saved[0], time.monotonic()
        if tokens:
            line = {"stage": stage, "rank": rank, "tokens": tokens, "seconds": now - self._saved[1]}
            with (folder / FILE).open("a") as record:
                record.write(json.dumps(line) + "\n")
        self._saved = (self.tokens, now)


def rates(folder: Path) -> dict[str, float]:
    """Tokens per second by stage, of all processes together, over all runs of the folder."""
    file = folder / FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found: dict[str, float] = {}
    for stage in dict.fromkeys(line["stage"] for line in lines):
        mine = [line for line in lines if line["stage"] == stage]
        side_by_side = len({line["rank"] for line in mine})
        seconds = sum(line["seconds"] for line in mine) / side_by_side
        found[stage] = sum(line["tokens"] for line in mine) / max(seconds, 1e-9)
    return found
