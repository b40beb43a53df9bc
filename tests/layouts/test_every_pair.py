"""What arrives between any two engines is what the reference says, byte for byte, and nothing else."""

from __future__ import annotations

import itertools
import struct
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from coordinator.layout import Extra, Layout
from coordinator.slices import legs, page_bytes, slice_of
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget
from tests.layouts.reference import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.layouts.conftest import Fabric

SIZES = (1, 2, 4, 8)
LAYERS = 3
ROOM = 7
SCALES = (Extra("k_scale", 1, "float32"), Extra("v_scale", 1, "float32"))


def layout_of(kind: str, page_tokens: int, pp: int = 1) -> Layout:
    stages = {1: (), 2: (2, 1), 3: (1, 1, 1)}[pp]
    changes: dict[str, dict[str, object]] = {
        "heads": {},
        "latent": {"kv_heads": 1, "head_size": 6, "dtype": "bfloat16", "kv": "latent"},
        "scales": {"dtype": "float8_e4m3", "extras": SCALES},
        "together": {"dtype": "bfloat16", "head_size": 2, "kv": "together"},
        "few heads": {"kv_heads": 2},
        "heads first": {"extras": SCALES, "order": "heads"},
        "heads first, together": {"kv": "together", "order": "heads"},
    }
    plain = Layout(LAYERS, page_tokens, 8, 4, "uint8", "apart", stages)
    return msgspec.structs.replace(plain, **changes[kind])


def packed(pages: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(pages)}i", *pages)


def hand_over(
    fabric: Fabric,
    prefill: Engine,
    decode: Engine,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    budget: Budget,
) -> None:
    """Write a room over all legs, and compare every byte of every pool of decode."""
    sources = [prefill.with_room(rank, ROOM, source_pages) for rank in range(prefill.world_size)]
    fabric.put(sources, decode.pools)
    pairs = legs(prefill.layout, prefill.world_size, decode.layout, decode.world_size)
    moved_bytes = 0
    for p, d in itertools.product(range(prefill.world_size), range(decode.world_size)):
        ours = RankPool(prefill.layout, prefill.world_size, p, prefill.pages)
        theirs = RankPool(decode.layout, decode.world_size, d, decode.pages)
        way = route(ours, theirs)
        assert bool(way.strips) == ((p, d) in pairs), "a route carries something exactly on a leg"
        posts = list(way.posts(packed(source_pages), packed(target_pages), budget))
        leg_bytes = sum(part.size_bytes for post in posts for part in post)
        piece = slice_of(prefill.layout, prefill.world_size, p, decode.layout, decode.world_size, d)
        assert leg_bytes == len(source_pages) * page_bytes(prefill.layout, piece)
        moved_bytes += leg_bytes
        fabric.write(p, d, posts)
    wanted_bytes = 0
    for rank in range(decode.world_size):
        expected = decode.with_room(rank, ROOM, target_pages)
        got = fabric.targets[rank].memory.bytes
        assert np.array_equal(got[: expected.size], expected), f"decode rank {rank}"
        assert (got[expected.size :] == 0xAB).all(), f"behind the pool of decode rank {rank}"
        wanted_bytes += sum(head.size_bytes for head in decode.memory[rank] if head.page in target_pages)
    assert moved_bytes == wanted_bytes, "every byte travels once"


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("kind", ["heads", "latent"])
@pytest.mark.parametrize("decode_tp", SIZES)
@pytest.mark.parametrize("prefill_tp", SIZES)
def test_every_pair_of_engines(
    fabric: Fabric, prefill_tp: int, decode_tp: int, kind: str, page_tokens: int, pp: int
) -> None:
    """Prefill with one or two pipeline stages, decode without: 8 KV heads, or one latent for all ranks."""
    prefill = Engine(layout_of(kind, page_tokens, pp), prefill_tp * pp, 4)
    decode = Engine(layout_of(kind, page_tokens), decode_tp, 3)
    hand_over(fabric, prefill, decode, [3, 0], [1, 2], Budget())


@pytest.mark.parametrize("pps", [(1, 2), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["heads", "latent", "scales", "together", "few heads", "heads first"])
def test_pipelines_on_both_sides_cut_elsewhere(
    fabric: Fabric, kind: str, tps: tuple[int, int], pps: tuple[int, int]
) -> None:
    prefill = Engine(layout_of(kind, 3, pps[0]), tps[0] * pps[0], 3)
    decode = Engine(layout_of(kind, 3, pps[1]), tps[1] * pps[1], 3)
    hand_over(fabric, prefill, decode, [2, 0], [0, 1], Budget())


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 4), (4, 1), (2, 8), (8, 4), (8, 8), (4, 8)])
@pytest.mark.parametrize("kind", ["scales", "together", "few heads", "heads first", "heads first, together"])
def test_other_layouts(fabric: Fabric, kind: str, prefill_tp: int, decode_tp: int) -> None:
    """K and V in one page, scales beside fp8, more ranks than heads; and posts of a few blocks."""
    prefill = Engine(layout_of(kind, 2), prefill_tp, 4)
    decode = Engine(layout_of(kind, 2), decode_tp, 5)
    hand_over(fabric, prefill, decode, [3, 0, 1], [4, 2, 3], Budget(post_blocks=5, post_bytes=20))


@pytest.mark.nixl
@pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="the nixl wheel is not installed")
@pytest.mark.parametrize(
    ("kind", "prefill_tp", "decode_tp", "pp"),
    [("scales", 2, 1, 1), ("heads", 1, 2, 2), ("latent", 2, 1, 2), ("heads first", 1, 2, 1)],
)
def test_a_sample_over_nixl(nixl_fabric: Fabric, kind: str, prefill_tp: int, decode_tp: int, pp: int) -> None:
    prefill = Engine(layout_of(kind, 16, pp), prefill_tp * pp, 4)
    decode = Engine(layout_of(kind, 16), decode_tp, 5)
    hand_over(nixl_fabric, prefill, decode, [3, 0, 1], [4, 2, 3], Budget(post_blocks=50))
