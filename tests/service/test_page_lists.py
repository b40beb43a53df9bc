"""Long page lists are judged as short ones are, only faster."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.page_lists import all_below

SIZES = st.integers(1, 2**31 - 1) | st.integers(1, 9)


@given(SIZES, st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 9), max_size=9))
def test_it_is_what_one_by_one_would_say(size: int, numbers: list[int]) -> None:
    packed = struct.pack(f"<{len(numbers)}I", *numbers)
    assert all_below(packed, size) == all(number < size for number in numbers)


@given(SIZES, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_also_when_all_are_just_inside(size: int, numbers: list[int]) -> None:
    """Neighbours do not add up to a sign."""
    inside = [size - 1 - number % size for number in numbers]
    assert all_below(struct.pack(f"<{len(inside)}I", *inside), size)


@pytest.mark.parametrize("wrong", [50_000, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("at", [0, 16_383, 16_384, 32_767, 49_999])
def test_one_page_in_many(at: int, wrong: int) -> None:
    """At either end of a step, too."""
    pages = np.random.default_rng(0).permutation(50_000).astype("<i4")
    assert all_below(pages.tobytes(), 50_000)
    pages[at] = wrong
    assert not all_below(pages.tobytes(), 50_000)
