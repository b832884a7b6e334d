"""A canvas being refined, drawn by rich: settled text plain, drafts coloured, masks as dots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor


class LiveCanvas:
    """A streamer for :class:`specdiff.DiffusionLM`.

    Args:
        tokenizer: turns ids into text.
        console: where to draw.
        delay: seconds between frames.
        before: ids shown in front (the text before a gap).
    """

    takes_noise = True

    def __init__(
        self, tokenizer: Any, console: Console | None = None, delay: float = 0.0, before: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.delay = delay
        self.settled: list[int] = list(before)
        self.frames = 0
        self._prompt = True
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._live.start()

    def put(self, value: Tensor) -> None:
        """Settled tokens; the first call of a generation is the prompt, which is not shown."""
        if self._prompt:
            self._prompt = False
            return
        self.settled += value.reshape(-1).tolist()

    def put_draft(self, value: Tensor, noisy: Tensor) -> None:
        """The open block."""
        frame = Text(self._decode(self.settled))
        run: list[int] = []
        for token, open_ in zip(value.reshape(-1).tolist(), noisy.reshape(-1).tolist(), strict=True):
            if not open_:
                run.append(token)
                continue
            frame.append(self._decode(run), style="yellow")
            run = []
            frame.append("·", style="dim")
        frame.append(self._decode(run), style="yellow")
        self.frames += 1
        self._live.update(frame, refresh=True)
        if self.delay:
            time.sleep(self.delay)

    def end(self) -> None:
        """Take the display away; may be called twice."""
        self._live.stop()

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
