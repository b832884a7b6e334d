"""No evaluation text in training data: shared n-grams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

Ids = Sequence[int] | np.ndarray
"""A text."""
N = 13
"""Length of the n-grams that must not be shared (the usual choice since GPT-3)."""


def ngrams(ids: Ids, n: int = N) -> set[tuple[int, ...]]:
    """All n-grams of a text."""
    values = [int(i) for i in ids]
    return {tuple(values[i : i + n]) for i in range(len(values) - n + 1)}


def taboo_of(held: Iterable[Ids], boilerplate: Iterable[Ids] = (), n: int = N) -> set[tuple[int, ...]]:
    """The n-grams of ``held`` without those of ``boilerplate``."""
    taboo: set[tuple[int, ...]] = set()
    for text in held:
        taboo |= ngrams(text, n)
    for text in boilerplate:
        taboo -= ngrams(text, n)
    return taboo


def holding(documents: Iterable[Ids], taboo: Set[tuple[int, ...]], n: int = N) -> list[int]:
    """Indices of ``documents`` that hold an n-gram of ``taboo``."""
    return [i for i, text in enumerate(documents) if not taboo.isdisjoint(ngrams(text, n))] if taboo else []


def shared(
    documents: Iterable[Ids],
    held: Iterable[Ids],
    boilerplate: Iterable[Ids] = (),
    n: int = N,
) -> list[int]:
    """Indices of ``documents`` that share an n-gram with a text of ``held``.

    Args:
        documents: training texts as ids.
        held: evaluation texts as ids.
        boilerplate: texts whose n-grams do not count (a system prompt, a template).
        n: n-gram length.
    """
    return holding(documents, taboo_of(held, boilerplate, n), n)
