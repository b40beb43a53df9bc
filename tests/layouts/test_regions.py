"""Pools in several regions: the same bytes go to the same places as with pools in one piece."""

from __future__ import annotations

import struct

import pytest

from backends.descriptors import all_blocks
from coordinator.errors import LayoutError
from coordinator.layout import Extra, Layout
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget

SOURCE = struct.pack("<3i", 4, 0, 2)
DESTINATION = struct.pack("<3i", 1, 5, 3)


def copies(source: RankPool, destination: RankPool) -> set[tuple[int, int, int]]:
    """Every block as (place in our pool, place in theirs, length), as if regions lay one behind the other."""
    found = set()
    for post in route(source, destination).posts(SOURCE, DESTINATION, Budget(post_blocks=7)):
        for part in post:
            for pool, grid in ((source, part.source), (destination, part.destination)):
                assert 0 <= grid.region < pool.regions
                assert grid.end_bytes <= pool.region_bytes()
            here, there = part.source, part.destination
            start = here.region * source.region_bytes() + here.offset_bytes
            end = there.region * destination.region_bytes() + there.offset_bytes
            found |= {
                (start + one * here.stride_bytes, end + other * there.stride_bytes, here.block_bytes)
                for one, other in zip(*(blocks.tolist() for blocks in all_blocks(part)), strict=True)
            }
    return found


@pytest.mark.parametrize("worlds", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("kv", ["apart", "together"])
@pytest.mark.parametrize(("stages", "rank"), [((), 0), ((4, 2), 0), ((4, 2), 1)])
@pytest.mark.parametrize(("ours", "theirs"), [(2, 1), (1, 6), (2, 3), (4, 6)])
def test_regions_are_only_another_way_to_count(
    worlds: tuple[int, int], kv: str, stages: tuple[int, ...], rank: int, ours: int, theirs: int
) -> None:
    prefill = Layout(6, 2, 2, 3, "uint8", kv, stages)  # type: ignore[arg-type]
    decode = Layout(6, 2, 2, 3, "uint8", kv)  # type: ignore[arg-type]
    tp, decode_tp = worlds
    world_size = tp * max(1, len(stages))
    planes = (stages[rank] if stages else 6) * (2 if kv == "apart" else 1)
    if planes % ours:
        ours = 2
    one_piece = copies(
        RankPool(prefill, world_size, rank * tp, 6), RankPool(decode, decode_tp, decode_tp - 1, 6)
    )
    several = copies(
        RankPool(prefill, world_size, rank * tp, 6, ours),
        RankPool(decode, decode_tp, decode_tp - 1, 6, theirs),
    )
    assert several == one_piece
    assert one_piece


def test_regions_that_cannot_be_are_refused_with_both_numbers() -> None:
    layout = Layout(3, 2, 2, 3, "uint8")
    fine = RankPool(layout, 1, 0, 6)
    for regions in (0, -1, 4):
        with pytest.raises(LayoutError, match=f"6 planes cannot be shared out evenly over {regions} regions"):
            route(fine, RankPool(layout, 1, 0, 6, regions))
    scaled = Layout(3, 2, 2, 3, "uint8", extras=(Extra("scale", 1, "float32"),))
    with pytest.raises(LayoutError, match="must be in one piece, not in 3 regions"):
        route(RankPool(scaled, 1, 0, 6, 3), RankPool(scaled, 1, 0, 6))
