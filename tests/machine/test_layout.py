"""The geometry of a pool, against references that count value by value."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import LayoutError
from coordinator.layout import DTYPE_BYTES, Extra, Layout, mismatches

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

FINE = Layout(layers=4, page_tokens=16, kv_heads=8, head_size=128, dtype="bfloat16")


def layouts(most: int = 4) -> SearchStrategy[Layout]:
    size = st.integers(1, most)
    return st.builds(
        Layout,
        layers=size,
        page_tokens=size,
        kv_heads=size,
        head_size=size,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        kv=st.sampled_from(["apart", "together"]),
    )


def values_of_a_rank(layout: Layout, pages: int, world_size: int) -> list[tuple[int, ...]]:
    """Every value in one rank's pool, named: layer, K or V, page, token, head, place in the head."""
    return list(
        itertools.product(
            range(layout.layers),
            range(2),
            range(pages),
            range(layout.page_tokens),
            [head for head in range(layout.kv_heads) if head % world_size == 0],
            range(layout.head_size),
        )
    )


@settings(max_examples=60)
@given(layouts(), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_bytes_of_a_pool_and_a_page(layout: Layout, pages: int, world_size: int) -> None:
    layout = Layout(
        layout.layers, layout.page_tokens, layout.kv_heads * world_size, layout.head_size,
        layout.dtype, layout.kv,
    )  # fmt: skip
    layout.check(world_size)
    values = values_of_a_rank(layout, pages, world_size)
    width = DTYPE_BYTES[layout.dtype]
    assert layout.pool_bytes(pages, world_size) == len(values) * width
    named = 2 if layout.kv == "apart" else 1  # by how much of a value's name its plane is known
    assert layout.planes == len({value[:named] for value in values_of_a_rank(layout, 1, world_size)})
    page_of_a_plane = [value for value in values if value[2] == 0 and value[:named] == values[0][:named]]
    if pages:
        assert layout.page_bytes(world_size) == len(page_of_a_plane) * width


def test_a_known_model_by_hand() -> None:
    # 4 layers, K and V; 16 tokens of 8 / 2 heads of 128 values of 2 bytes
    assert FINE.planes == 8
    assert FINE.page_bytes(2) == 16 * 4 * 128 * 2 == 16384
    assert FINE.pool_bytes(1000, 2) == 8 * 1000 * 16384


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
def test_widths_are_those_of_numpy(dtype: str) -> None:
    assert DTYPE_BYTES[dtype] == np.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_widths_are_those_that_the_names_say(dtype: str) -> None:
    """Numpy does not know all of them."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    assert found is not None
    assert DTYPE_BYTES[dtype] == int(found[1]) // 8


def test_a_sound_layout_passes() -> None:
    FINE.check(1)
    FINE.check(8)


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1])
@pytest.mark.parametrize("field", ["layers", "page_tokens", "kv_heads", "head_size"])
def test_a_size_out_of_bounds_is_named(field: str, value: int) -> None:
    with pytest.raises(LayoutError) as caught:
        changed(**{field: value}).check(1)
    assert str(caught.value) == f"{field} is {value}, must be from 1 to 2**20"


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(0, 16, 8, -5, "float12").check(1)
    text = str(caught.value)
    assert "layers is 0" in text
    assert "head_size is -5" in text
    assert "dtype is 'float12', must be one of float32, float16, bfloat16" in text
    assert "page_tokens" not in text


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"kv_heads is 8, must divide by the 3 TP ranks, or they by it"):
        FINE.check(3)
    with pytest.raises(LayoutError, match=r"kv_heads is 8, must divide by the 12 TP ranks"):
        FINE.check(12)
    # More ranks than heads: each head is on two of them.
    FINE.check(16)


LATENT = Layout(layers=4, page_tokens=16, kv_heads=1, head_size=576, dtype="bfloat16", kv="latent")


@pytest.mark.parametrize(
    ("fields", "world_size", "text"),
    [
        ({"stages": (2, 1)}, 2, "stages is [2, 1], must be layers of each stage, 4 in all"),
        ({"stages": (5, -1)}, 2, "stages is [5, -1], must be layers of each stage, 4 in all"),
        ({"stages": (2, 2)}, 3, "world_size is 3, must divide by the 2 stages"),
        ({"stages": (2, 2)}, 1, "world_size is 1, must divide by the 2 stages"),
        ({"kv": "latent"}, 1, "kv_heads is 8, must be 1 when kv is 'latent'"),
        ({"extras": (Extra("s", 0, "int8"),)}, 1, "extras.s.head_size is 0, must be from 1 to 2**20"),
        ({"extras": (Extra("s", 1, "int7"),)}, 1, "extras.s.dtype is 'int7', must be one of float32, "),
        (
            {"extras": (Extra("s", 1, "int8"), Extra("s", 2, "int8"))}, 1,
            "extras are s, s: each must have a name of its own",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_naming_field_and_value(
    fields: dict[str, Any], world_size: int, text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        changed(**fields).check(world_size)
    assert str(caught.value).startswith(text)


def test_what_each_rank_holds() -> None:
    """Two stages of unequal length, two ranks in each."""
    layout = changed(stages=(3, 1), extras=(Extra("k_scale", 1, "float32"),))
    layout.check(4)
    assert [layout.share(4, rank)[:4] for rank in range(4)] == [
        (0, 3, 0, 4),
        (0, 3, 4, 4),
        (3, 1, 0, 4),
        (3, 1, 4, 4),
    ]
    a_layer = 16 * 4 * (2 * 128 * 2 + 4)
    assert [layout.pool_bytes(10, 4, rank) for rank in range(4)] == [
        10 * layers * a_layer for layers in (3, 3, 1, 1)
    ]


@pytest.mark.parametrize(("kv_heads", "world_size"), [(4, 8), (1, 4), (8, 8)])
def test_more_ranks_than_heads_hold_copies(kv_heads: int, world_size: int) -> None:
    layout = changed(kv_heads=kv_heads)
    layout.check(world_size)
    copies = world_size // kv_heads
    assert [layout.share(world_size, rank)[2:] for rank in range(world_size)] == [
        (rank // copies, 1, rank % copies, copies) for rank in range(world_size)
    ]


def test_a_latent_is_one_plane_of_a_layer_and_whole_on_every_rank() -> None:
    LATENT.check(8)
    assert LATENT.planes == 4
    assert {LATENT.page_bytes(world_size) for world_size in (1, 2, 8)} == {16 * 576 * 2}


CHANGES: dict[str, Any] = {
    "layers": 5,
    "page_tokens": 32,
    "kv_heads": 16,
    "head_size": 64,
    "dtype": "float16",
    "kv": "together",
    "extras": (Extra("k_scale", 1, "float32"), Extra("v_scale", 1, "float32")),
    "order": "heads",
}


def changed(**fields: Any) -> Layout:  # noqa: ANN401 - the fields are of several types
    return msgspec.structs.replace(FINE, **fields)


def test_layouts_that_fit_have_no_mismatch() -> None:
    assert mismatches(FINE, changed()) == []


def test_pipelines_may_differ() -> None:
    assert mismatches(FINE, changed(stages=(2, 2))) == []


def test_every_field_is_compared() -> None:
    assert {*CHANGES, "stages"} == set(Layout.__struct_fields__)


TOLD = {"extras": "k_scale (1 x float32), v_scale (1 x float32)"}


@given(st.sets(st.sampled_from(list(CHANGES))))
def test_mismatches_are_named_all_at_once_with_both_values(fields: set[str]) -> None:
    """Case C47: the text names the field and both values."""
    other = changed(**{field: CHANGES[field] for field in fields})
    assert mismatches(FINE, other) == [
        f"{field}: prefill has {'none' if field == 'extras' else repr(getattr(FINE, field))}, "
        f"decode has {TOLD.get(field) or repr(CHANGES[field])}"
        for field in Layout.__struct_fields__
        if field in fields
    ]
