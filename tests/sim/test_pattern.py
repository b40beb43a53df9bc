"""The contents of pages: every kind of wrong page is found, and no right one is accused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.layout import Extra, Layout
from coordinator.sim.pattern import Pattern, aux_of, sections_of

PLANES, PAGES, PAGE_BYTES = 3, 16, 64
#: Two rows of two heads, each of two words, on each of two ranks.
LAYOUT = Layout(layers=PLANES, page_tokens=1, kv_heads=4, head_size=16, dtype="uint8", kv="together")
ROOM, GENERATION = 7, 1
OURS = np.array([5, 2, 11, 8], dtype=np.int32)

Bytes = NDArray[np.uint8]


def pool() -> Bytes:
    return np.zeros(PLANES * PAGES * PAGE_BYTES, dtype=np.uint8)


def pattern(memory: Bytes, rank: int = 0) -> Pattern:
    return Pattern(sections_of([memory], LAYOUT, 2, rank, PAGES))


def filled(rank: int = 0) -> Bytes:
    memory = pool()
    pattern(memory, rank).fill(OURS, ROOM, GENERATION)
    return memory


def wrong(memory: Bytes, rank: int = 0, generation: int = GENERATION) -> list[int]:
    return list(map(int, pattern(memory, rank).wrong(OURS, ROOM, generation)))


def by_page(memory: Bytes) -> Bytes:
    return memory.reshape(PLANES, PAGES, PAGE_BYTES)


def test_what_was_filled_is_right_and_nothing_else_was_touched() -> None:
    memory = filled()
    assert wrong(memory) == []
    others = np.setdiff1d(np.arange(PAGES), OURS)
    assert not by_page(memory)[:, others].any()


def test_chunks_make_the_same_as_one_piece() -> None:
    memory = pool()
    chunked = pattern(memory)
    chunked.fill(OURS[:1], ROOM, GENERATION, first=0)
    chunked.fill(OURS[1:], ROOM, GENERATION, first=1)
    assert memory.tobytes() == filled().tobytes()


@settings(max_examples=200)
@given(
    plane=st.integers(0, PLANES - 1),
    position=st.integers(0, OURS.size - 1),
    byte=st.integers(0, PAGE_BYTES - 1),
    flip=st.integers(1, 255),
)
def test_one_changed_byte_is_found(plane: int, position: int, byte: int, flip: int) -> None:
    memory = filled()
    by_page(memory)[plane, OURS[position], byte] ^= flip
    assert wrong(memory) == [position]


@given(first=st.integers(0, OURS.size - 1), second=st.integers(0, OURS.size - 1))
def test_two_pages_in_each_others_place_are_found(first: int, second: int) -> None:
    memory = filled()
    pages = by_page(memory)
    pages[:, [OURS[first], OURS[second]]] = pages[:, [OURS[second], OURS[first]]]
    assert wrong(memory) == ([] if first == second else sorted({first, second}))


def test_two_planes_in_each_others_place_are_found() -> None:
    memory = filled()
    by_page(memory)[[0, 2]] = by_page(memory)[[2, 0]].copy()
    assert wrong(memory) == [0, 1, 2, 3]


def test_a_page_that_never_came_is_found() -> None:
    memory = filled()
    by_page(memory)[:, OURS[2]] = 0
    assert wrong(memory) == [2]


@pytest.mark.parametrize(
    ("room", "generation", "rank"),
    [(ROOM, GENERATION - 1, 0), (ROOM + 1, GENERATION, 0), (ROOM, GENERATION, 1)],
    ids=["stale generation", "another room", "another rank"],
)
def test_a_foreign_page_is_found(room: int, generation: int, rank: int) -> None:
    memory = filled()
    pattern(memory, rank).fill(OURS[1:2], room, generation, first=1)
    assert wrong(memory) == [1]


def test_a_page_shifted_by_a_word_is_found() -> None:
    memory = filled()
    page = by_page(memory)[1, OURS[3]]
    page[:] = np.roll(page, 8)
    assert wrong(memory) == [3]


def test_a_page_torn_in_the_middle_is_found() -> None:
    memory = filled()
    old = pool()
    pattern(old).fill(OURS, ROOM, GENERATION - 1)
    by_page(memory)[0, OURS[0], PAGE_BYTES // 2 :] = by_page(old)[0, OURS[0], PAGE_BYTES // 2 :]
    assert wrong(memory) == [0]


def test_side_data_are_those_of_one_use_of_one_room() -> None:
    assert len({aux_of(room, generation) for room in (1, 2, 11) for generation in (0, 1)}) == 6


def test_the_heads_of_another_rank_are_found() -> None:
    memory, other = filled(), filled(rank=1)
    by_page(memory)[1, OURS[2], 16:32] = by_page(other)[1, OURS[2], 16:32]
    assert wrong(memory) == [2]


def test_a_head_in_the_row_of_another_token_is_found() -> None:
    memory = filled()
    page = by_page(memory)[0, OURS[1]]
    page[:] = np.roll(page, 32)
    assert wrong(memory) == [1]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_words_of_any_width_tell_positions_planes_rows_and_heads_apart(width: int) -> None:
    """Many places, so that with narrow words whole heads must differ although single words agree."""
    layout = Layout(
        layers=8, page_tokens=4, kv_heads=2, head_size=8 * width, dtype="uint8", stages=(4, 4),
        extras=(Extra("scale", 16 + width, "uint8"),),
    )  # fmt: skip
    sections = [np.zeros(8 * 4 * 4 * 8 * width, np.uint8), np.zeros(4 * 4 * 4 * (16 + width), np.uint8)]
    pattern = Pattern(sections_of(sections, layout, 4, 3, pages=4))
    pattern.fill(np.arange(4, dtype=np.int32), ROOM, GENERATION)
    heads = [*sections[0].reshape(-1, 8 * width), *sections[1].reshape(-1, 16 + width)]
    assert len({head.tobytes() for head in heads}) == len(heads)
    assert pattern.wrong(np.arange(4, dtype=np.int32), ROOM, GENERATION).size == 0
    sections[1][-1] ^= 1
    assert pattern.wrong(np.arange(4, dtype=np.int32), ROOM, GENERATION).tolist() == [3]


@pytest.mark.parametrize("stages", [(), (1, 2)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_engines_of_any_size_have_the_same_contents(tp: int, stages: tuple[int, ...]) -> None:
    """Head by head: what one rank alone has is what the ranks of a larger engine have together."""
    page = OURS[:1]

    def heads_of(layout: Layout, world_size: int) -> dict[tuple[int, int, int], bytes]:
        found: dict[tuple[int, int, int], bytes] = {}
        for rank in range(world_size):
            share = layout.share(world_size, rank)
            memory = np.zeros(layout.pool_bytes(PAGES, world_size, rank), np.uint8)
            sections = sections_of([memory], layout, world_size, rank, PAGES)
            Pattern(sections).fill(page, ROOM, GENERATION)
            words = sections[0].words[:, page[0]]
            for plane, row, head in np.ndindex(*words.shape[:3]):
                place = (share.first_layer + plane, row, share.first_head + head)
                assert (
                    found.setdefault(place, words[plane, row, head].tobytes())
                    == words[plane, row, head].tobytes()
                )
        return found

    staged = Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"stages": stages})
    alone = heads_of(LAYOUT, 1)
    assert heads_of(staged, tp * max(1, len(stages))) == alone
    assert len(set(alone.values())) == len(alone) == 3 * 2 * 4
