"""Whatever layouts, pools and page lists are claimed: refused, or every block is inside both regions."""

from __future__ import annotations

import struct
from itertools import islice

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from backends.base import InvalidTransferError
from backends.descriptors import all_blocks, check_parts
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import Extra, Layout
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget

#: What a message can carry where it is not bounded, and what is near to the usual.
ANY = st.integers(-(2**63), 2**63) | st.integers(-1, 4) | st.sampled_from([2**20, 2**31 - 1, 2**31, 2**32])
BUDGETS = st.builds(Budget, post_blocks=st.integers(1, 50), post_bytes=st.integers(1, 500))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout, mostly a possible one."""
    kv = draw(st.sampled_from(["apart", "together", "latent"]))
    heads = 1 if kv == "latent" else draw(st.sampled_from([1, 2, 4]))
    extras = [
        Extra(name, draw(st.integers(1, 3)), "int8") for name in draw(st.sampled_from(["", "", "a", "ab"]))
    ]
    layout = Layout(
        layers=4,
        page_tokens=draw(st.integers(1, 3)),
        kv_heads=heads,
        head_size=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["int8", "float16"])),
        kv=kv,  # type: ignore[arg-type]
        stages=draw(st.sampled_from([(), (1, 3), (2, 2)])),
        extras=tuple(extras),
        order=draw(st.sampled_from(["tokens", "heads"])),
    )
    spoilt = draw(st.sampled_from([*[""] * 16, *Layout.__struct_fields__]))
    hostile = {
        **dict.fromkeys(("layers", "page_tokens", "kv_heads", "head_size"), ANY),
        "dtype": st.just("int7"),
        "stages": st.lists(ANY, max_size=3).map(tuple),
        "extras": st.builds(Extra, st.just("a"), ANY, st.sampled_from(["int8", ""])).map(
            lambda one: (one, one)
        ),
    }
    return msgspec.structs.replace(layout, **{spoilt: draw(hostile[spoilt])}) if spoilt in hostile else layout


@st.composite
def pools(draw: st.DrawFn, layout: Layout) -> RankPool:
    """A pool with this layout, mostly a possible one."""
    spoilt = draw(st.sampled_from([*[""] * 12, "world", "rank", "pages", "regions"]))

    def field(name: str, usual: st.SearchStrategy[int]) -> int:
        return draw(ANY if name == spoilt else usual)

    world = field("world", st.sampled_from([1, 2, 4]).map(lambda tp: tp * max(1, len(layout.stages))))
    rank = field("rank", st.integers(0, max(0, min(world, 8) - 1)))
    pages = field("pages", st.integers(4, 9))
    return RankPool(layout, world, rank, pages, field("regions", st.sampled_from([1, 1, 1, 2])))


#: That a test looks at.
MOST_POSTS = 1000


@settings(max_examples=400)
@given(st.data())
def test_what_is_planned_lies_inside_both_pools(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    other = data.draw(layouts()) if data.draw(st.integers(0, 7)) == 0 else layout
    ours, theirs = data.draw(pools(layout)), data.draw(pools(other))
    page = st.sampled_from([*range(4)] * 6 + [4, 8, -1, 2**31 - 1, -(2**31)])
    count = data.draw(st.integers(0, 3))
    pairs = data.draw(st.lists(st.tuples(page, page), min_size=count, max_size=count))
    source, destination = (b"".join(struct.pack("<i", pair[side]) for pair in pairs) for side in (0, 1))
    source += data.draw(st.sampled_from([*[b""] * 12, b"x", bytes(4)]))
    try:
        planned = route(ours, theirs).posts(source, destination, data.draw(BUDGETS))
        # A page of many tokens, in posts of a few blocks, has hundreds of thousands.
        posts = list(islice(planned, MOST_POSTS))
    except (LayoutError, PoolError) as refusal:
        event(type(refusal).__name__)
        return
    event("planned" if posts else "nothing to move")
    local_bytes, remote_bytes = [ours.region_bytes()] * ours.regions, [theirs.region_bytes()] * theirs.regions
    for post in posts:
        assert check_parts(post, local_bytes, remote_bytes) > 0
        for part in post:
            assert {blocks.dtype for blocks in all_blocks(part)} == {np.dtype(np.int32)}


@given(st.sampled_from(["tokens", "heads"]), st.integers(1, 3), st.integers(1, 3))
def test_a_peer_that_claims_more_than_it_registered_is_refused(order: str, tp: int, missing: int) -> None:
    """The last door: a grid that ends behind what the peer's endpoint has never reaches an engine."""
    layout = Layout(2, 2, 6, 4, "uint8", "apart", (), (Extra("scale", 1, "int8"),), order)  # type: ignore[arg-type]
    ours, theirs = RankPool(layout, 1, 0, 4), RankPool(layout, tp, tp - 1, 4)
    (post,) = route(ours, theirs).posts(struct.pack("<i", 0), struct.pack("<i", 3), Budget())
    sizes = [ours.region_bytes()], [theirs.region_bytes() - missing]
    with pytest.raises(InvalidTransferError, match=r"destination grid ends at byte"):
        check_parts(post, *sizes)
