"""Which rank sends which layers and heads to which: the legs between two engines, and what each carries.

Every layer and head that a decode rank holds comes to it from exactly one prefill rank that holds it
too. Where prefill has copies of a head, the decode ranks that need it take turns with them, so that no
rank sends more than it must; a prefill rank whose copy nobody needs has no leg at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from coordinator.errors import LayoutError
from coordinator.layout import mismatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.layout import Layout


class Slice(NamedTuple):
    """What one leg carries of each page. Layers and heads are counted within the rank that holds them.

    Attributes:
        source_layer: first one at the prefill rank.
        destination_layer: first one at the decode rank.
        layers: how many.
        source_head: first one at the prefill rank.
        destination_head: first one at the decode rank.
        heads: how many.

    """

    source_layer: int
    destination_layer: int
    layers: int
    source_head: int
    destination_head: int
    heads: int


def legs(
    prefill: Layout, prefill_world: int, decode: Layout, decode_world: int
) -> tuple[tuple[int, int], ...]:
    """The (prefill rank, decode rank) pairs between which pages must move, sorted.

    Raises:
        LayoutError: a layout is impossible, or the two do not fit.

    """
    prefill.check(prefill_world)
    decode.check(decode_world)
    problems = mismatches(prefill, decode)
    if problems:
        raise LayoutError("; ".join(problems))
    prefill_tp, decode_tp = prefill.tp(prefill_world), decode.tp(decode_world)
    within = list(_legs_of_stage(prefill, prefill_tp, decode_tp))
    return tuple(
        sorted(
            (source * prefill_tp + p, destination * decode_tp + d)
            for source, destination in _stages(prefill, decode)
            for p, d in within
        )
    )


def slice_of(
    prefill: Layout, prefill_world: int, p: int, decode: Layout, decode_world: int, d: int
) -> Slice | None:
    """What the leg from prefill rank ``p`` to decode rank ``d`` carries; None when there is no such leg.

    The layouts must have passed ``check``, and fit.
    """
    source, destination = prefill.share(prefill_world, p), decode.share(decode_world, d)
    if source.copy != _copy_for(destination.copy, source.copies, destination.copies):
        return None
    layer = max(source.first_layer, destination.first_layer)
    layers = min(source.first_layer + source.layers, destination.first_layer + destination.layers) - layer
    head = max(source.first_head, destination.first_head)
    heads = min(source.first_head + source.heads, destination.first_head + destination.heads) - head
    if layers <= 0 or heads <= 0:
        return None
    return Slice(
        layer - source.first_layer,
        layer - destination.first_layer,
        layers,
        head - source.first_head,
        head - destination.first_head,
        heads,
    )


def page_bytes(layout: Layout, piece: Slice | None) -> int:
    """Bytes that a leg carries of each page, over all sections; 0 without a leg."""
    if piece is None:
        return 0
    a_layer = sum(section.planes * section.rows * section.head_bytes for section in layout.sections)
    return piece.layers * piece.heads * a_layer


def _copy_for(copy: int, source_copies: int, destination_copies: int) -> int:
    """Choose the prefill copy that feeds a decode copy: spread evenly, the same where they are as many."""
    return copy * source_copies // destination_copies


def _legs_of_stage(layout: Layout, prefill_tp: int, decode_tp: int) -> Iterator[tuple[int, int]]:
    """Yield the legs between the TP ranks of one stage on each side, by steps as many as there are legs."""
    heads = layout.kv_heads
    source_heads, source_copies = max(1, heads // prefill_tp), max(1, prefill_tp // heads)
    heads_each, copies = max(1, heads // decode_tp), max(1, decode_tp // heads)
    for d in range(decode_tp):
        group, copy = divmod(d, copies)
        first, last = group * heads_each, group * heads_each + heads_each - 1
        for holder in range(first // source_heads, last // source_heads + 1):
            yield holder * source_copies + _copy_for(copy, source_copies, copies), d


def _stages(prefill: Layout, decode: Layout) -> Iterator[tuple[int, int]]:
    """Yield the pairs of stages that have a layer in common."""
    sources, destinations = _ranges(prefill), _ranges(decode)
    for p, (first, end) in enumerate(sources):
        for d, (other_first, other_end) in enumerate(destinations):
            if first < other_end and other_first < end:
                yield p, d


def _ranges(layout: Layout) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one behind its last."""
    ends = []
    end = 0
    for layers in layout.stages or (layout.layers,):
        ends.append((end, end + layers))
        end += layers
    return ends
