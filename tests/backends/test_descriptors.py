"""The checks and the merging of block lists, against the plain definition in Python loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Grid, InvalidTransferError, Part
from backends.descriptors import all_blocks, check_parts, merged_runs, runs_of

REGION_BYTES = 1000
#: Of the regions, compared with where the destination grid ends.
SPARE_BYTES = st.sampled_from([-1000, -1, 0, 1, 1000])
NUMBERS = st.lists(st.integers(0, 4), min_size=1, max_size=3) | st.lists(st.integers(-2, 9), max_size=3)
GOOD_GRIDS = st.builds(
    Grid,
    region=st.integers(0, 1),
    offset_bytes=st.integers(0, 50),
    block_bytes=st.sampled_from([7, 8]),
    stride_bytes=st.integers(8, 12),
    count=st.integers(5, 8),
)
FIELDS = st.sampled_from(["region", "offset_bytes", "block_bytes", "stride_bytes", "count"])
SPOILED_GRIDS = st.builds(
    lambda grid, field, value: replace(grid, **{field: value}),
    GOOD_GRIDS,
    FIELDS,
    st.sampled_from([-1, 0, 9]),
)
GRIDS = GOOD_GRIDS | SPOILED_GRIDS


def int32(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def reachable(grid: Grid, numbers: list[int], region_bytes: int) -> bool:
    """Whether every block, one by one, is a block of the grid and inside the region."""
    return (
        grid.region in (0, 1)
        and grid.count > 0
        and 0 < grid.block_bytes <= grid.stride_bytes
        and grid.offset_bytes >= 0
        and all(
            grid.offset_bytes + number * grid.stride_bytes + grid.block_bytes <= region_bytes
            for number in range(grid.count)
        )
        and all(0 <= number < grid.count for number in numbers)
    )


@settings(max_examples=500)
@given(GRIDS, NUMBERS, GRIDS, NUMBERS, SPARE_BYTES)
def test_only_what_lies_inside_is_accepted(
    source: Grid, source_numbers: list[int], destination: Grid, numbers: list[int], spare_bytes: int
) -> None:
    _check_one(source, source_numbers, destination, numbers, destination.end_bytes + spare_bytes)
    _check_one(destination, source_numbers, destination, source_numbers, destination.end_bytes + spare_bytes)


def _check_one(
    source: Grid, source_numbers: list[int], destination: Grid, numbers: list[int], region_bytes: int
) -> None:
    """Compare the verdict on one part with that of the loops."""
    part = Part(source, int32(source_numbers), destination, int32(numbers))
    wanted = (
        reachable(source, source_numbers, region_bytes)
        and reachable(destination, numbers, region_bytes)
        and len(source_numbers) == len(numbers) > 0
        and source.block_bytes == destination.block_bytes
    )
    try:
        size_bytes = check_parts([part], [region_bytes] * 2, [region_bytes] * 2)
    except InvalidTransferError:
        assert not wanted
    else:
        assert wanted
        assert size_bytes == len(numbers) * source.block_bytes


@settings(max_examples=500)
@given(GRIDS, GRIDS, st.lists(st.tuples(*[st.integers(-2, 9)] * 3), max_size=3))
def test_runs_are_accepted_as_their_blocks_are(
    source: Grid, destination: Grid, runs: list[tuple[int, int, int]]
) -> None:
    """A run of no blocks, or of fewer, is always refused."""
    columns = [int32([run[column] for run in runs]) for column in range(3)]
    steps = [(one + step, other + step) for one, other, length in runs for step in range(length)]
    one_by_one = int32([step[0] for step in steps]), int32([step[1] for step in steps])
    wanted = accepted(Part(source, one_by_one[0], destination, one_by_one[1]))
    part = Part(source, columns[0], destination, columns[1], columns[2])

    assert accepted(part) == (wanted if all(run[2] > 0 for run in runs) else 0)
    if accepted(part):
        assert [blocks.tolist() for blocks in all_blocks(part)] == [blocks.tolist() for blocks in one_by_one]


def accepted(part: Part) -> int:
    """Size of a part that is accepted; 0: it is not."""
    try:
        return check_parts([part], [REGION_BYTES] * 2, [REGION_BYTES] * 2)
    except InvalidTransferError:
        return 0


@pytest.mark.parametrize(
    ("first", "length"), [(2**31 - 1, 2**31 - 1), (-1, 2**31 - 1), (-(2**31), 2**31 - 1), (1, -(2**31))]
)
def test_no_run_is_so_long_that_its_end_wraps_around(first: int, length: int) -> None:
    grid = Grid(0, 0, 10, 10, 100)
    for runs in ((first, 0), (0, first)):
        assert not accepted(Part(grid, int32([runs[0]]), grid, int32([runs[1]]), int32([length])))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_blocks_and_their_runs_are_the_same(pairs: list[tuple[int, int]]) -> None:
    blocks = int32([pair[0] for pair in pairs]), int32([pair[1] for pair in pairs])
    grid = Grid(0, 0, 4, 4, 8)
    source, destination, lengths = runs_of(*blocks)

    again = all_blocks(Part(grid, source, grid, destination, lengths))

    assert [array.dtype for array in (source, destination, lengths, *again)] == [np.dtype(np.int32)] * 5
    assert [array.tolist() for array in again] == [array.tolist() for array in blocks]
    runs = list(zip(source.tolist(), destination.tolist(), lengths.tolist(), strict=True))
    assert not any((a[0] + a[2], a[1] + a[2]) == b[:2] for a, b in pairwise(runs)), (
        "they are as few as can be"
    )


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("bad", [-(2**31), -1, 100, 2**31 - 1])
def test_a_block_that_is_beyond_the_grid_is_refused_on_either_side(bad: int, runs: bool) -> None:  # noqa: FBT001
    grid = Grid(0, 0, 10, 10, 100)
    lengths = int32([1, 1]) if runs else None
    good, wrong = int32([0, 99]), int32([0, bad])
    assert accepted(Part(grid, good, grid, good, lengths)) == 20
    for side, (ours, theirs) in {"source": (wrong, good), "destination": (good, wrong)}.items():
        with pytest.raises(InvalidTransferError, match=f"{side} blocks reach from"):
            check_parts([Part(grid, ours, grid, theirs, lengths)], [REGION_BYTES], [REGION_BYTES])


@pytest.mark.parametrize(
    "blocks",
    [
        [0],
        np.array([0], np.int64),
        np.array([0], np.uint32),
        np.array([0], np.float32),
        np.array([0], ">i4"),
        np.array([[0]], np.int32),
        np.array(0, np.int32),
    ],
)
def test_numbers_that_an_engine_would_misread_are_refused_wherever_they_stand(blocks: object) -> None:
    grid, good = Grid(0, 0, 10, 10, 100), int32([1])
    for what in ("source_blocks", "destination_blocks", "lengths"):
        arrays: dict[str, Any] = {"source_blocks": good, "destination_blocks": good, "lengths": good}
        arrays[what] = blocks
        with pytest.raises(InvalidTransferError, match=what.replace("_", " ") + " must be .* int32"):
            check_parts([Part(source=grid, destination=grid, **arrays)], [REGION_BYTES], [REGION_BYTES])


@pytest.mark.parametrize("field", ["region", "offset_bytes", "block_bytes", "stride_bytes", "count"])
@pytest.mark.parametrize("kind", [np.int64, np.int32, float, bool])
def test_a_grid_is_made_of_plain_ints(field: str, kind: type) -> None:
    """Others overflow silently in a product, and do so differently in each engine."""
    grid = Grid(0, 0, 1, 1, 1)
    spoiled = replace(grid, **{field: kind(getattr(grid, field))})
    for source, destination in ((spoiled, grid), (grid, spoiled)):
        with pytest.raises(InvalidTransferError, match="a field that is not an int"):
            check_parts([Part(source, int32([0]), destination, int32([0]))], [REGION_BYTES], [REGION_BYTES])


def test_the_message_names_part_side_and_values() -> None:
    grid = Grid(0, 0, 10, 10, 100)
    good = Part(grid, int32([0]), grid, int32([0]))
    bad = Part(grid, int32([0]), grid, int32([-7]))
    with pytest.raises(InvalidTransferError, match=r"part 1: destination blocks reach from -7 to -7, .* 100"):
        check_parts([good, bad], [REGION_BYTES], [REGION_BYTES])


def test_a_grid_has_no_more_blocks_than_can_be_numbered() -> None:
    """Else a negative number, read as unsigned, would be one of them."""
    large = 1 << 50
    grid = Grid(0, 0, 256, 256, 3 << 30)
    part = Part(grid, int32([-(1 << 31) + 5]), grid, int32([-(1 << 31) + 5]))
    with pytest.raises(InvalidTransferError, match="source grid is impossible"):
        check_parts([part], [large], [large])


@given(st.data())
def test_runs_copy_the_same_bytes_and_are_as_few_as_can_be(data: st.DataObject) -> None:
    """Runs, one by one, give what the blocks give, one by one."""
    count = data.draw(st.integers(1, 12))
    starts = data.draw(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=5))
    pairs = [(one + step, other + step) for one, other in starts for step in range(count)]
    strides = data.draw(st.sampled_from([(4, 4), (4, 6), (6, 6)]))
    source, destination = (Grid(0, 8, 4, stride, 32) for stride in strides)
    part = Part(source, int32([pair[0] for pair in pairs]), destination, int32([pair[1] for pair in pairs]))

    runs = merged_runs(part)

    blocks = [(8 + one * source.stride_bytes, 8 + other * destination.stride_bytes) for one, other in pairs]
    expanded = [
        (int(start) + step, int(end) + step)
        for start, end, size in zip(*runs, strict=True)
        for step in range(0, int(size), 4)
    ]
    assert expanded == blocks
    joins = list(zip(zip(*runs, strict=True), list(zip(*runs, strict=True))[1:], strict=False))
    assert not any(a[0] + a[2] == b[0] and a[1] + a[2] == b[1] for a, b in joins)


def test_no_blocks_are_no_runs() -> None:
    grid = Grid(0, 0, 4, 4, 8)
    assert [array.size for array in merged_runs(Part(grid, int32([]), grid, int32([])))] == [0, 0, 0]
