"""Text as it comes: ids to pieces of text, and which of them were drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Mark = bool | None
"""Of a token: True drafted and accepted, False the target's own, None not known or not asked for."""


LONGEST = 8
"""Held tokens after which text is shown as it is; a character has at most 4 bytes, so it will not become one."""


class Detokenizer:
    """Turns ids into text one at a time; holds back what is not yet a whole character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = self._seen = 0

    def push(self, token: int) -> str:
        """The text that ``token`` adds; empty while a character is incomplete."""
        self._ids.append(token)
        before, now = self._decode(self._shown, self._seen), self._decode(self._shown, None)
        patient = len(self._ids) - self._seen < LONGEST
        if patient and (len(now) <= len(before) or now.endswith("\ufffd")):
            return ""
        self._shown, self._seen = self._seen, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What was held back; starts afresh."""
        before, now = self._decode(self._shown, self._seen), self._decode(self._shown, None)
        self._ids, self._shown, self._seen = [], 0, 0
        return now[len(before) :]

    def _decode(self, start: int, stop: int | None) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)


class TextWriter:
    """A streamer for one row: writes new text as it is committed.

    Args:
        tokenizer: turns ids into text.
        write: called with each piece of text and the mark of its (last) token.
        marked: hold tokens until :meth:`round_begins` or :meth:`finish` tells which of them were drafted.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str, Mark], None], *, marked: bool = False) -> None:
        self._text = Detokenizer(tokenizer)
        self._write = write
        self._marked = marked
        self._held: list[int] = []
        self._rounds = 0
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt (first call) or new tokens: ``Long[1]``."""
        if self._prompt:
            self._prompt = False
            return
        tokens = value.reshape(-1).tolist()
        if self._marked:
            self._held += tokens
            return
        for token in tokens:
            self._show(token, None)

    def round_begins(self) -> None:
        """What was committed since the last call is one round: drafts, then one token of the target's own."""
        if self._held:
            self._rounds += 1
        for token in self._held[:-1]:
            self._show(token, True)
        for token in self._held[-1:]:
            self._show(token, False)
        self._held = []

    def end(self) -> None:
        """Nothing follows."""
        if not self._marked:
            self._flush()

    def finish(self, emitted: Sequence[int], accepted: int) -> None:
        """Show what is still held, by the call's own statistics: new tokens per pass, and accepted drafts in all."""
        before = sum(count - 1 for count in emitted[1:-1])
        for at in range(self._rounds, len(emitted)):
            last = at == len(emitted) - 1 and at > 0
            drafted = accepted - before if last else emitted[at] - 1
            for slot, token in enumerate(self._held[: emitted[at]]):
                self._show(token, slot < drafted)
            self._held = self._held[emitted[at] :]
        self._flush()

    def _show(self, token: int, mark: Mark) -> None:
        piece = self._text.push(token)
        if piece:
            self._write(piece, mark)

    def _flush(self) -> None:
        rest = self._text.rest()
        if rest:
            self._write(rest, None)
