"""Who sends what to whom, against counting head by head and the arithmetic that engines use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from coordinator.errors import LayoutError
from coordinator.layout import Layout
from coordinator.slices import legs, page_bytes, slice_of

SIZES = (1, 2, 4, 8)


def layout(kv_heads: int = 8, layers: int = 4, stages: tuple[int, ...] = ()) -> Layout:
    return Layout(layers, 16, kv_heads, 64, "bfloat16", "latent" if kv_heads == 1 else "apart", stages)


def held(one: Layout, world_size: int, rank: int) -> set[tuple[int, int]]:
    """The (layer, head) pairs of a rank."""
    share = one.share(world_size, rank)
    return set(
        itertools.product(
            range(share.first_layer, share.first_layer + share.layers),
            range(share.first_head, share.first_head + share.heads),
        )
    )


@st.composite
def engines(draw: st.DrawFn, kv_heads: int, layers: int) -> tuple[Layout, int]:
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    ends = [0, *sorted(cuts), layers]
    stages = tuple(end - start for start, end in itertools.pairwise(ends)) if cuts else ()
    one = layout(kv_heads, layers, stages)
    world_size = draw(st.integers(1, 12)) * max(1, len(stages))
    return one, world_size


@settings(max_examples=200)
@given(st.data())
def test_each_decode_rank_gets_each_of_its_layers_and_heads_exactly_once(data: st.DataObject) -> None:
    kv_heads, layers = data.draw(st.sampled_from([1, 2, 4, 6, 8, 12])), data.draw(st.integers(1, 5))
    prefill, prefill_world = data.draw(engines(kv_heads, layers))
    decode, decode_world = data.draw(engines(kv_heads, layers))
    try:
        pairs = legs(prefill, prefill_world, decode, decode_world)
    except LayoutError:
        reject()
    assert list(pairs) == sorted(set(pairs)), "sorted, and each once"
    for d in range(decode_world):
        got: list[tuple[int, int]] = []
        for p in range(prefill_world):
            piece = slice_of(prefill, prefill_world, p, decode, decode_world, d)
            assert (piece is not None) == ((p, d) in pairs)
            if piece is None:
                continue
            source, target = prefill.share(prefill_world, p), decode.share(decode_world, d)
            sent = set(
                itertools.product(
                    range(piece.source_layer, piece.source_layer + piece.layers),
                    range(piece.source_head, piece.source_head + piece.heads),
                )
            )
            named = {(source.first_layer + layer, source.first_head + head) for layer, head in sent}
            assert named <= held(prefill, prefill_world, p)
            assert named == {
                (
                    target.first_layer + piece.destination_layer - piece.source_layer + layer,
                    target.first_head + piece.destination_head - piece.source_head + head,
                )
                for layer, head in sent
            }
            got += named
            assert page_bytes(prefill, piece) == len(named) * prefill.sections[0].planes * 16 * 64 * 2
        assert sorted(got) == sorted(held(decode, decode_world, d))


@pytest.mark.parametrize("prefill_tp", SIZES)
@pytest.mark.parametrize("decode_tp", SIZES)
def test_head_slices_are_those_that_engines_compute(prefill_tp: int, decode_tp: int) -> None:
    """The arithmetic of SGLang, for 8 KV heads."""
    one = layout()
    for p, d in legs(one, prefill_tp, one, decode_tp):
        piece = slice_of(one, prefill_tp, p, one, decode_tp, d)
        assert piece is not None
        if prefill_tp > decode_tp:
            heads = max(1, 8 // prefill_tp)
            assert piece[3:] == (0, p * heads % max(1, 8 // decode_tp), heads)
        else:
            heads = max(1, 8 // decode_tp)
            assert piece[3:] == (d * heads % max(1, 8 // prefill_tp), 0, heads)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_equal_engines_pair_rank_by_rank(size: int, kv_heads: int) -> None:
    one = layout(kv_heads)
    assert legs(one, size, one, size) == tuple((rank, rank) for rank in range(size))


@pytest.mark.parametrize("prefill_tp", SIZES)
@pytest.mark.parametrize("decode_tp", SIZES)
def test_a_latent_comes_from_one_source_and_the_sources_take_turns(prefill_tp: int, decode_tp: int) -> None:
    one = layout(1)
    pairs = legs(one, prefill_tp, one, decode_tp)
    assert [d for _, d in sorted(pairs, key=lambda pair: pair[1])] == list(range(decode_tp))
    loads = [sum(1 for p, _ in pairs if p == rank) for rank in range(prefill_tp)]
    assert max(loads) == max(1, decode_tp // prefill_tp)


def test_each_stage_sends_its_layers() -> None:
    prefill, decode = layout(8, 5, (3, 2)), layout(8, 5)
    assert legs(prefill, 4, decode, 2) == ((0, 0), (1, 1), (2, 0), (3, 1))
    assert slice_of(prefill, 4, 3, decode, 2, 1) == (0, 3, 2, 0, 0, 4)
    assert slice_of(prefill, 4, 3, decode, 2, 0) is None


def test_engines_that_do_not_fit_have_no_legs() -> None:
    with pytest.raises(LayoutError, match="kv_heads: prefill has 8, decode has 4"):
        legs(layout(8), 1, layout(4), 1)
    with pytest.raises(LayoutError, match="kv_heads is 8, must divide by the 3 TP ranks"):
        legs(layout(8), 1, layout(8), 3)


def test_a_thousand_ranks_are_paired_by_steps_as_many_as_there_are_legs() -> None:
    """Case C34's kind: no square of the ranks, which would hold up the coordinator's loop."""
    many = layout(1024)
    assert len(legs(many, 1024, many, 1024)) == 1024
    assert len(legs(many, 1024, many, 1)) == 1024
