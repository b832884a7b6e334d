"""A text with gaps as tokens, and what was written into them as text again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_OPENING = "([{<\"'"


def gapped(tokenizer: Any, parts: Sequence[str | int], filler: int) -> tuple[list[int], list[bool], list[slice]]:
    """Tokens of a text with gaps, between the special tokens that the tokenizer puts around a text.

    Args:
        tokenizer: encodes each part by itself.
        parts: pieces of text, and for each gap its number of tokens.
        filler: the id that stands in gaps.

    Returns:
        ids, which of them are gaps, and for each gap its place.
    """
    before, after = _around(tokenizer, "".join(p for p in parts if isinstance(p, str)))
    ids = list(before)
    hole = [False] * len(before)
    places: list[slice] = []
    for part in parts:
        if isinstance(part, int):
            places.append(slice(len(ids), len(ids) + part))
            piece = [filler] * part
        else:
            piece = tokenizer.encode(part, add_special_tokens=False) if part else []
        ids += piece
        hole += [isinstance(part, int)] * len(piece)
    return ids + after, hole + [False] * len(after), places


def filled(tokenizer: Any, parts: Sequence[str | int], ids: Sequence[int], places: Sequence[slice]) -> str:
    """The text with its gaps filled; every piece of text stands as it was given.

    Args:
        tokenizer: decodes what stands in the gaps.
        parts: as for :func:`gapped`.
        ids: the tokens after infilling.
        places: of the gaps.
    """
    text = ""
    gaps = iter(places)
    for part in parts:
        text += part if isinstance(part, str) else _written(tokenizer, ids, next(gaps), text)
    return text


def _written(tokenizer: Any, ids: Sequence[int], place: slice, before: str) -> str:
    """Text of a gap. Decoders treat the first token of a text in their own way, so its left side is decoded too."""
    if place.start == place.stop:
        return ""
    alone = str(tokenizer.decode(list(ids[place]), skip_special_tokens=True))
    left = str(tokenizer.decode(list(ids[: place.start]), skip_special_tokens=True)) if place.start else ""
    both = str(tokenizer.decode(list(ids[: place.stop]), skip_special_tokens=True))
    if not left or not both.startswith(left):
        return alone
    here = both[len(left) :]
    joined = here.startswith(" ") and not alone.startswith(" ")
    # a space that the decoder puts between words, where none belongs
    if joined and (not before or before[-1].isspace() or before[-1] in _OPENING):
        return here[1:]
    return here


def _around(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer puts before and after a text."""
    if not text:
        return [], []
    whole = list(tokenizer.encode(text, add_special_tokens=True))
    bare = list(tokenizer.encode(text, add_special_tokens=False))
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []
