"""Page lists: every form that engines have, and every one that cannot be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.client.pages import pack
from coordinator.errors import PoolError

if TYPE_CHECKING:
    from coordinator.client.pages import Pages

EXPECTED = b"\3\0\0\0\1\0\0\0\2\0\0\0"
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arrays_of_every_integer_type(dtype: str) -> None:
    assert pack(np.array([3, 1, 2], dtype), 4) == EXPECTED
    with pytest.raises(PoolError, match="page 3 is not in the pool, whose pages are 0 to 2"):
        pack(np.array([3, 1, 2], dtype), 3)


@pytest.mark.parametrize(
    "pages",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 0, 1, 0, 2])[::2],
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        torch.tensor([[3, 9], [1, 9], [2, 9]])[:, 0],
        [np.int64(3), np.int32(1), np.uint8(2)],
    ],
)
def test_lists_strides_and_tensors(pages: Pages) -> None:
    assert pack(pages, 4) == EXPECTED


@pytest.mark.parametrize("pages", [[], (), np.array([]), np.array([], np.int32), torch.tensor([])])
def test_no_pages(pages: Pages) -> None:
    assert pack(pages, 4) == b""
    assert pack(pages, 4, distinct=True) == b""


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([-1], "page -1 is not in the pool"),
        ([2, 2**31], "page 2147483648 is not in the pool"),
        ([2**63], "page 9223372036854775808 is not in the pool"),
        ([2**64], "page 18446744073709551616 is not in the pool"),
        ([2**32], "page 4294967296 is not in the pool"),
        (np.array([-(2**63)]), "page -9223372036854775808 is not in the pool"),
        ([1.0], r"pages are \[1.0\], must be integers"),
        (["1"], "must be integers"),
        ([None], "must be integers"),
        ([[1, 2]], "must be integers in one dimension"),
        ([[1], [2, 3]], "must be integers in one dimension"),
        (np.array([True, False]), "dtype bool, must be integers"),
        (np.array([[1, 2]]), r"shape \(1, 2\), must have one dimension"),
        (5, r"shape \(\), must have one dimension"),
        (torch.tensor(5), r"shape \(\), must have one dimension"),
        (torch.tensor([1.5]), "dtype float32, must be integers"),
        (torch.tensor([True]), "dtype bool, must be integers"),
    ],
)
@pytest.mark.parametrize("repeat", [1, 300])
def test_what_cannot_be_right(pages: Pages, message: str, repeat: int) -> None:
    if repeat > 1 and isinstance(pages, list):
        pages = pages * repeat
        message = f"{message}|must be integers|not a list of page numbers|must have one dimension"
    with pytest.raises(PoolError, match=message):
        pack(pages, 4)


def test_a_page_named_twice_is_refused_where_it_is_written() -> None:
    assert pack([1, 2, 1], 4) == b"\1\0\0\0\2\0\0\0\1\0\0\0"
    with pytest.raises(PoolError, match="page 1 is named twice"):
        pack([1, 2, 1], 4, distinct=True)


@given(
    st.lists(st.integers(-5, 2**40) | st.integers(0, 999), max_size=50),
    st.sampled_from([0, 300, 301]),
    st.integers(1, 2**31 - 1),
    st.booleans(),
    st.booleans(),
)
def test_what_is_packed_is_what_was_named(
    pages: list[int],
    more: int,
    pool_pages: int,
    distinct: bool,  # noqa: FBT001 - hypothesis draws it
    as_array: bool,  # noqa: FBT001 - hypothesis draws it
) -> None:
    pages += range(1000, 1000 + more)
    fits = all(0 <= page < pool_pages for page in pages)
    if fits and not (distinct and len(set(pages)) < len(pages)):
        packed = pack(np.array(pages, np.int64) if as_array else pages, pool_pages, distinct=distinct)
        assert np.frombuffer(packed, "<i4").tolist() == pages
    else:
        with pytest.raises(PoolError):
            pack(pages, pool_pages, distinct=distinct)
