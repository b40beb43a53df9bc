"""Chunks, prefixes and page lists as hypothesis draws them, through the state machine and the planner."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.descriptors import all_blocks
from coordinator.events import Moved, Offered, Paired, Pairing, Sent, StartMove, State
from coordinator.layout import Extra, Layout
from coordinator.machine import HandoffMachine
from coordinator.slices import legs
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget
from tests.layouts.reference import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from backends.base import Part
    from coordinator.events import Event

ROOM = 3
POOL = 6


@st.composite
def pairs_of_engines(draw: st.DrawFn) -> tuple[Engine, Engine]:
    kind = draw(st.sampled_from(["apart", "together", "latent", "scales"]))
    layers = draw(st.integers(2, 3))
    stages = st.sampled_from([(), (1, layers - 1)])
    heads = 1 if kind == "latent" else draw(st.sampled_from([2, 4]))
    tokens = draw(st.integers(1, 3))
    extras = (Extra("scale", 1, "float32"),) if kind == "scales" else ()
    engines = []
    for _ in range(2):
        layout = Layout(
            layers, tokens, heads, 2, "uint8",
            "apart" if kind == "scales" else kind, draw(stages), extras,  # type: ignore[arg-type]
        )  # fmt: skip
        tp = draw(st.sampled_from([1, 2, 4]))
        engines.append(Engine(layout, tp * max(1, len(layout.stages)), POOL))
    return engines[0], engines[1]


def packed(pages: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<i", page) for page in pages)


def copy(posts: Iterable[list[Part]], source: NDArray[np.uint8], destination: NDArray[np.uint8]) -> None:
    """Copy as the contract of a backend says: block by block."""
    for part in (part for post in posts for part in post):
        assert part.source.end_bytes <= source.size
        assert part.destination.end_bytes <= destination.size
        for here, there in zip(*(blocks.tolist() for blocks in all_blocks(part)), strict=True):
            assert 0 <= here < part.source.count
            assert 0 <= there < part.destination.count
            start = part.source.offset_bytes + here * part.source.stride_bytes
            end = part.destination.offset_bytes + there * part.destination.stride_bytes
            block = part.source.block_bytes
            destination[end : end + block] = source[start : start + block]


@settings(max_examples=80)
@given(st.data())
def test_any_chunks_prefixes_and_orders_bring_every_byte_to_its_place(data: st.DataObject) -> None:
    """Also when decode has all of it already (case C48); completion is counted by leg (case C34)."""
    prefill, decode = data.draw(pairs_of_engines())
    count = data.draw(st.integers(0, POOL))
    lists = st.permutations(range(POOL)).map(lambda pages: list(pages)[:count])
    events: list[list[Event]] = [
        [Paired(Pairing.of(prefill.world_size, decode.world_size, legs_between(prefill, decode)))]
    ]
    source_pages, target_pages, prefixes = [], [], []
    for rank in range(prefill.world_size):
        pages = data.draw(lists)
        source_pages.append(pages)
        ends = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
        chunks = [pages[start:end] for start, end in zip([0, *ends], [*ends, count], strict=True)]
        events.append(
            [Sent(rank, packed(chunk), last=n == len(chunks) - 1) for n, chunk in enumerate(chunks)]
        )
    for rank in range(decode.world_size):
        pages, prefix = data.draw(lists), data.draw(st.integers(0, count))
        target_pages.append(pages)
        prefixes.append(prefix)
        events.append([Offered(rank, packed(pages[prefix:]), prefix)])
    # Each rank keeps its own order; how they come together is anybody's guess.
    turns = data.draw(st.permutations([who for who, said in enumerate(events) for _ in said]))
    machine = HandoffMachine(ROOM, 1)
    moves: dict[int, StartMove] = {}
    said: defaultdict[int, int] = defaultdict(int)
    for who in turns:
        for effect in machine.apply(events[who][said[who]]):
            if isinstance(effect, StartMove):
                moves[effect.move] = effect
        said[who] += 1
        machine.validate()

    sources = [prefill.with_room(rank, ROOM, pages) for rank, pages in enumerate(source_pages)]
    budget = Budget(post_blocks=data.draw(st.integers(1, 40)), post_bytes=data.draw(st.integers(1, 200)))
    for number in data.draw(st.permutations(sorted(moves))):
        assert machine.state is State.MOVING, "not before the last leg is done"
        move = moves[number]
        p, d = move.leg
        way = route(
            RankPool(prefill.layout, prefill.world_size, p, POOL),
            RankPool(decode.layout, decode.world_size, d, POOL),
        )
        copy(way.posts(move.source_pages, move.destination_pages, budget), sources[p], decode.pools[d])
        machine.apply(Moved(number))
        machine.apply(Moved(number))  # a second time it counts for nothing
    assert machine.state is State.SUCCEEDED
    untouched = Engine(decode.layout, decode.world_size, POOL)
    for rank, pages in enumerate(target_pages):
        prefix = prefixes[rank]
        assert np.array_equal(decode.pools[rank], untouched.with_room(rank, ROOM, pages[prefix:], prefix))


def legs_between(prefill: Engine, decode: Engine) -> tuple[tuple[int, int], ...]:
    return legs(prefill.layout, prefill.world_size, decode.layout, decode.world_size)
