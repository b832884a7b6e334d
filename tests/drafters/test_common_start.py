"""The common start of two id sequences, against slicing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdiff.drafters.common_start import common_start

IDS = st.lists(st.integers(0, 2), max_size=8)


@given(IDS, IDS)
def test_it_is_the_longest_equal_start(one: list[int], other: list[int]) -> None:
    count = common_start(one, other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_numbers() -> None:
    assert common_start([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_start([], [1]) == 0
    assert common_start([7, 7], [7, 7]) == 2
