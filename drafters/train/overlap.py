"""No evaluation text in training data: shared n-grams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

N = 13
"""Length of the n-grams that must not be shared (the usual choice since GPT-3)."""


def ngrams(ids: Sequence[int], n: int = N) -> set[tuple[int, ...]]:
    """All n-grams of a text."""
    values = [int(i) for i in ids]
    return {tuple(values[i : i + n]) for i in range(len(values) - n + 1)}


def taboo_of(
    held: Iterable[Sequence[int]], boilerplate: Iterable[Sequence[int]] = (), n: int = N
) -> set[tuple[int, ...]]:
    """The n-grams of ``held`` without those of ``boilerplate``."""
    taboo: set[tuple[int, ...]] = set()
    for text in held:
        taboo |= ngrams(text, n)
    for text in boilerplate:
        taboo -= ngrams(text, n)
    return taboo


def holding(documents: Iterable[Sequence[int]], taboo: Set[tuple[int, ...]], n: int = N) -> list[int]:
    """Indices of ``documents`` that hold an n-gram of ``taboo``."""
    return [i for i, text in enumerate(documents) if not taboo.isdisjoint(ngrams(text, n))] if taboo else []


def shared(
    documents: Iterable[Sequence[int]],
    held: Iterable[Sequence[int]],
    boilerplate: Iterable[Sequence[int]] = (),
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
