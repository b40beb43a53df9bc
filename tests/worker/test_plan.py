"""The planner, against a slow and obvious reference that copies page by page."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Grid
from backends.descriptors import all_blocks, merged_runs
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import Layout
from coordinator.worker.places import RankPool
from coordinator.worker.plan import Route, Strip, route
from coordinator.worker.settings import Budget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from backends.base import BlockIndex, Part

LAYOUT = Layout(layers=2, page_tokens=4, kv_heads=2, head_size=8, dtype="bfloat16")
PAGE_BYTES = LAYOUT.page_bytes(1)
SOURCE = RankPool(LAYOUT, 1, 0, pages=16)
DESTINATION = RankPool(LAYOUT, 1, 0, pages=24)
ROOMY = Budget()


def packed(pages: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(pages)}i", *pages)


def random_pool(pool: RankPool, seed: int) -> NDArray[np.uint8]:
    size = pool.layout.pool_bytes(pool.pages, pool.world_size)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def apply(parts: Iterable[Part], source: NDArray[np.uint8], destination: NDArray[np.uint8]) -> None:
    """Copy as the contract of a backend says: block by block."""
    for part in parts:
        assert part.source.block_bytes == part.destination.block_bytes
        for here, there in zip(*(blocks.tolist() for blocks in all_blocks(part)), strict=True):
            assert 0 <= here < part.source.count
            assert 0 <= there < part.destination.count
            start = part.source.offset_bytes + here * part.source.stride_bytes
            end = part.destination.offset_bytes + there * part.destination.stride_bytes
            block = part.source.block_bytes
            destination[end : end + block] = source[start : start + block]


def by_hand(
    move: Iterable[tuple[int, int]],
    pools: tuple[RankPool, RankPool],
    source: NDArray[np.uint8],
    destination: NDArray[np.uint8],
) -> None:
    """Copy every plane of every page, by the words of ``coordinator/layout.py``."""
    ours, theirs = pools
    page_bytes = ours.layout.page_bytes(ours.world_size)
    for here, there in move:
        for plane in range(ours.layout.planes):
            start = (plane * ours.pages + here) * page_bytes
            end = (plane * theirs.pages + there) * page_bytes
            destination[end : end + page_bytes] = source[start : start + page_bytes]


@st.composite
def orders(draw: st.DrawFn, pages: int) -> list[int]:
    """All pages, in runs as well as scattered."""
    cuts = sorted({0, pages, *draw(st.lists(st.integers(0, pages), max_size=4))})
    runs = [list(range(start, end)) for start, end in pairwise(cuts)]
    if draw(st.booleans()):
        return list(draw(st.permutations(range(pages))))
    return [page for run in draw(st.permutations(runs)) for page in run]


@st.composite
def cases(draw: st.DrawFn) -> tuple[RankPool, RankPool, list[tuple[int, int]], Budget]:
    layout = Layout(
        layers=draw(st.integers(1, 4)),
        page_tokens=draw(st.sampled_from([1, 3, 16])),
        kv_heads=2,
        head_size=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(["uint8", "bfloat16"])),
        kv=draw(st.sampled_from(["apart", "together"])),
    )
    world_size = draw(st.sampled_from([1, 2]))
    here = draw(st.integers(1, 12))
    there = draw(st.integers(1, 12))
    most = min(here, there)
    sources = draw(orders(here))[: draw(st.integers(0, most))]
    destinations = draw(orders(there))[: len(sources)]
    budget = Budget(post_blocks=draw(st.integers(1, 30)), post_bytes=draw(st.integers(1, 2000)))
    return (
        RankPool(layout, world_size, 0, here),
        RankPool(layout, world_size, 0, there),
        list(zip(sources, destinations, strict=True)),
        budget,
    )


@given(cases())
@settings(max_examples=150)
def test_a_planned_move_puts_every_byte_where_the_reference_does(
    case: tuple[RankPool, RankPool, list[tuple[int, int]], Budget],
) -> None:
    ours, theirs, move, budget = case
    source, planned, expected = random_pool(ours, 1), random_pool(theirs, 2), random_pool(theirs, 2)
    here, there = [pair[0] for pair in move], [pair[1] for pair in move]

    posts = list(route(ours, theirs).posts(packed(here), packed(there), budget))
    for post in posts:
        apply(post, source, planned)
    by_hand(move, (ours, theirs), source, expected)

    assert np.array_equal(planned, expected)
    page_bytes = ours.layout.page_bytes(ours.world_size)
    assert sum(part.size_bytes for post in posts for part in post) == (
        len(move) * ours.layout.planes * page_bytes
    )
    for post in posts:
        blocks = sum(part.count for part in post)
        assert 1 <= blocks <= budget.post_blocks
        assert sum(part.size_bytes for part in post) <= max(budget.post_bytes, page_bytes)
        assert all(array.dtype == np.int32 for part in post for array in all_blocks(part))


def test_posts_are_as_full_as_the_bounds_allow() -> None:
    posts = list(
        route(SOURCE, DESTINATION).posts(packed(range(16)), packed(range(16)), replace_budget(post_blocks=32))
    )

    # Four planes of sixteen pages: two planes in each post.
    assert [sum(part.count for part in post) for post in posts] == [32, 32]


def test_a_row_longer_than_a_post_is_cut_evenly() -> None:
    posts = list(
        route(SOURCE, DESTINATION).posts(packed(range(16)), packed(range(16)), replace_budget(post_blocks=15))
    )

    assert {sum(part.count for part in post) for post in posts} == {8}


def test_strips_share_a_post_while_there_is_room() -> None:
    """Several buffers in a pool (scales beside the values) do not mean several posts."""

    def strip(region: int, block_bytes: int) -> Strip:
        grid = Grid(region, 0, block_bytes, block_bytes, 8)
        first: BlockIndex = np.zeros(1, np.int32)
        return Strip(grid, grid, first, first)

    both = Route((strip(0, 100), strip(1, 10)), source_pages=8, destination_pages=8)

    (together,) = both.posts(packed([1, 2]), packed([3, 4]), ROOMY)
    assert [part.source.region for part in together] == [0, 1]
    apart = list(both.posts(packed([1, 2]), packed([3, 4]), Budget(post_bytes=200)))
    assert [[part.source.region for part in post] for post in apart] == [[0], [1]]


def test_blocks_smaller_than_a_page_are_taken_page_by_page() -> None:
    """Two rows a page: on our side a row is whole, on theirs it is every second half of one."""
    ours, theirs = Grid(0, 0, 8, 8, 20), Grid(0, 8, 8, 16, 20)
    strip = Strip(ours, theirs, np.array([0, 10], np.int32), np.array([10, 0], np.int32), rows=2)

    ((part,),) = Route((strip,), 5, 5).posts(packed([0, 3]), packed([4, 1]), ROOMY)

    source_blocks, destination_blocks = all_blocks(part)
    assert source_blocks.tolist() == [0, 1, 6, 7, 10, 11, 16, 17]
    assert destination_blocks.tolist() == [18, 19, 12, 13, 8, 9, 2, 3]


def test_pages_that_follow_one_another_are_planned_as_runs() -> None:
    """On both sides, that is; and as long as a post may be."""
    ours, theirs = replace(SOURCE, pages=200), replace(DESTINATION, pages=200)
    here, there = range(200), [*range(100, 200), *range(100)]
    (post,) = route(ours, theirs).posts(packed(here), packed(there), ROOMY)
    (part,) = post

    assert part.lengths is not None
    assert part.source_blocks.tolist() == [0, 100, 200, 300, 400, 500, 600, 700]
    assert part.destination_blocks.tolist() == [100, 0, 300, 200, 500, 400, 700, 600]
    assert part.lengths.tolist() == [100] * 8

    posts = route(ours, theirs).posts(packed(here), packed(there), replace_budget(post_blocks=80))
    parts = [part for post in posts for part in post]
    # Columns of 67, 67 and 66 blocks, of which the second one is broken.
    assert [part.source_blocks.tolist() for part in parts[::4]] == [[0], [67, 100], [134]]
    assert [None if part.lengths is None else part.lengths.tolist() for part in parts[::4]] == [
        [67], [33, 34], [66]
    ]  # fmt: skip


def test_few_pages_are_left_to_the_backend_to_merge() -> None:
    """To look for runs would take longer than all the rest."""
    (post,) = route(SOURCE, DESTINATION).posts(packed([4, 5, 6]), packed([1, 2, 3]), ROOMY)
    assert [part.lengths for part in post] == [None]
    assert [runs.tolist() for runs in merged_runs(post[0])[2:]] == [[3 * PAGE_BYTES] * 4]


def test_a_move_without_pages_has_no_posts() -> None:
    assert list(route(SOURCE, DESTINATION).posts(b"", b"", ROOMY)) == []


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        (packed([16]), packed([0]), r"source page 16 \(number 0 of the list\) is not in .* 16 pages"),
        (packed([3, -1]), packed([0, 1]), r"source page -1 \(number 1"),
        (packed([0]), packed([24]), r"destination page 24 .* of 24 pages"),
        (packed([0]), packed([2**31 - 1]), r"destination page 2147483647"),
        (packed([0]), packed([-(2**31)]), r"destination page -2147483648"),
        (packed([0, 1]), packed([0]), r"2 source pages, 1 destination pages"),
        (b"\0\0\0", packed([0]), r"source page list has 3 bytes"),
        (packed([0]), b"\0\0\0\0\0", r"destination page list has 5 bytes"),
    ],
)
def test_pages_outside_a_pool_are_refused_before_anything_is_planned(
    source: bytes, destination: bytes, text: str
) -> None:
    with pytest.raises(PoolError, match=text):
        route(SOURCE, DESTINATION).posts(source, destination, ROOMY)


def test_layouts_that_do_not_fit_are_refused_naming_both_values() -> None:
    other = replace_layout(page_tokens=8)
    with pytest.raises(LayoutError, match="page_tokens: prefill has 4, decode has 8"):
        route(SOURCE, replace(DESTINATION, layout=other))


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="layers is 0"):
        route(replace(SOURCE, layout=replace_layout(layers=0)), DESTINATION)


def test_a_pool_of_more_blocks_than_an_int32_can_number_is_refused() -> None:
    with pytest.raises(LayoutError, match="planes x 1073741824 pages"):
        route(replace(SOURCE, pages=2**30), DESTINATION)
    # Where heads differ a page has a block for each row of it: four here.
    two = replace_layout(kv_heads=2)
    with pytest.raises(LayoutError, match="planes x 268435456 pages x 4 blocks"):
        route(RankPool(two, 2, 0, 2**28), RankPool(two, 1, 0, 2**28))


@pytest.mark.parametrize(
    ("world_size", "rank", "pages"), [(1, 1, 4), (2, -1, 4), (0, 0, 4), (-1, 0, 4), (1, 0, 0)]
)
def test_a_pool_that_cannot_be_is_refused(world_size: int, rank: int, pages: int) -> None:
    with pytest.raises(PoolError, match="there is no such pool"):
        route(SOURCE, RankPool(LAYOUT, world_size, rank, pages))


def test_ranks_that_share_nothing_move_nothing() -> None:
    """A copy that nobody needs: one latent on four ranks of prefill, for one of decode."""
    latent = Layout(2, 4, 1, 8, "bfloat16", "latent")
    ways = [route(RankPool(latent, 4, rank, 8), RankPool(latent, 1, 0, 8)) for rank in range(4)]
    assert [len(list(way.posts(packed([1]), packed([2]), ROOMY))) for way in ways] == [1, 0, 0, 0]


def replace_layout(**changes: int) -> Layout:
    fields = {name: getattr(LAYOUT, name) for name in Layout.__struct_fields__}
    return Layout(**{**fields, **changes})


def replace_budget(post_blocks: int) -> Budget:
    return Budget(post_blocks=post_blocks)
