"""Which texts are loops: small models fall into repetition, and repetition is easy to draft."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 6
"""Length of the n-grams that are counted."""
SHARE = 0.25
"""A text is a loop when at least this share of its n-grams has occurred in it before."""


def repeated_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of a text's n-grams that occurred earlier in the same text; 0 for texts shorter than two n-grams.

    Only new tokens count: copying from the prompt (a summary, a quotation) is no loop.
    """
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    if len(grams) < 2:
        return 0.0
    return 1.0 - len(set(grams)) / len(grams)


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether the loop filter leaves this text out."""
    return repeated_share(tokens) >= SHARE
