"""What ``kv-coordinator plan`` tells is what the planner and the backends do."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec
import pytest

from backends.descriptors import merged_runs
from coordinator.layout import Extra, Layout
from coordinator.sizing import Side, refusal, sizes
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = Layout(5, 4, 4, 8, "bfloat16")
SHAPES = {
    "plain": PLAIN,
    "together": msgspec.structs.replace(PLAIN, kv="together"),
    "heads first": msgspec.structs.replace(PLAIN, order="heads"),
    "latent": msgspec.structs.replace(PLAIN, kv="latent", kv_heads=1),
    "scales": msgspec.structs.replace(PLAIN, extras=(Extra("scale", 1, "float32"),)),
}


def descriptors(prefill: Side, p: int, decode: Side, d: int, pages: Sequence[int]) -> int:
    """How many contiguous copies the planner and the merging of backends come to."""
    packed = struct.pack(f"<{len(pages)}i", *pages)
    way = route(
        RankPool(prefill.layout, prefill.world_size, p, 64), RankPool(decode.layout, decode.world_size, d, 64)
    )
    posts = way.posts(packed, packed, Budget())
    return sum(merged_runs(part).size_bytes.size for post in posts for part in post)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, 1), (1, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 1)), ((2, 2), (2, 1))]
)
def test_the_figures_are_those_of_the_planner(
    shape: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    source, target = (
        Side.of(msgspec.structs.replace(SHAPES[shape], stages=(3, 2) if pp == 2 else ()), tp)
        for tp, pp in (prefill, decode)
    )
    # 9 pages, of which the last one is not full: it travels whole.
    legs = sizes(source, target, tokens=9 * 4 - 1)
    for leg in legs:
        ends = (source, leg.source, target, leg.destination)
        assert leg.merged == descriptors(*ends, range(3, 12))
        assert leg.scattered == descriptors(*ends, range(3, 21, 2))
    received = sum(leg.size_bytes for leg in legs)
    assert received == sum(
        target.layout.pool_bytes(9, target.world_size, rank) for rank in range(target.world_size)
    )


def test_what_cannot_be_is_refused_all_at_once() -> None:
    """Case C47."""
    other = msgspec.structs.replace(PLAIN, page_tokens=8, dtype="float32")
    assert refusal(Side(PLAIN, 3), Side(other, 1)) == [
        "prefill: kv_heads is 4, must divide by the 3 TP ranks, or they by it",
        "page_tokens: prefill has 4, decode has 8",
        "dtype: prefill has 'bfloat16', decode has 'float32'",
    ]
