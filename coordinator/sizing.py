"""What a handoff between two engines amounts to, for people who size a deployment: ``kv-coordinator plan``.

A *descriptor* is a contiguous piece of memory that a transfer engine is told to copy. Where both ranks of
a leg hold the same heads, each page is one in each plane, and pages that follow one another on both sides
are merged. Where they do not, each row of a page is one, and nothing can be merged: there is a gap behind
each on one side at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.errors import LayoutError
from coordinator.layout import mismatches
from coordinator.slices import legs, page_bytes, slice_of

if TYPE_CHECKING:
    from coordinator.layout import Layout
    from coordinator.slices import Slice


@dataclass(frozen=True, slots=True)
class Side:
    """One engine.

    Attributes:
        layout: of its cache, with its pipeline stages.
        world_size: ranks in it.

    """

    layout: Layout
    world_size: int

    @classmethod
    def of(cls, layout: Layout, tp: int) -> Side:
        """An engine with ``tp`` ranks in each stage of its layout."""
        return cls(layout, tp * max(1, len(layout.stages)))


@dataclass(frozen=True, slots=True)
class LegSize:
    """One leg of a handoff.

    Attributes:
        source: prefill rank.
        destination: decode rank.
        layers: first and last layer that it carries, counted over the model.
        heads: first and last head.
        size_bytes: what it carries.
        scattered: descriptors when no two pages follow one another.
        merged: descriptors when all pages do.

    """

    source: int
    destination: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    size_bytes: int
    scattered: int
    merged: int


def refusal(prefill: Side, decode: Side) -> list[str]:
    """Say why two engines cannot exchange pages, one reason an item; empty when they can."""
    problems = []
    for name, side in (("prefill", prefill), ("decode", decode)):
        try:
            side.layout.check(side.world_size)
        except LayoutError as error:
            problems.append(f"{name}: {error}")
    return problems + mismatches(prefill.layout, decode.layout)


def sizes(prefill: Side, decode: Side, tokens: int) -> list[LegSize]:
    """Work out every leg of a handoff of ``tokens`` tokens between engines that fit.

    Raises:
        LayoutError: they do not.

    """
    pages = -(-tokens // prefill.layout.page_tokens)
    found = []
    for p, d in legs(prefill.layout, prefill.world_size, decode.layout, decode.world_size):
        piece = slice_of(prefill.layout, prefill.world_size, p, decode.layout, decode.world_size, d)
        if piece is not None:
            found.append(_size(prefill, p, decode, d, piece, pages))
    return found


def _size(prefill: Side, p: int, decode: Side, d: int, piece: Slice, pages: int) -> LegSize:
    source, target = prefill.layout.share(prefill.world_size, p), decode.layout.share(decode.world_size, d)
    whole = piece.heads == source.heads == target.heads
    sections = prefill.layout.sections
    planes = [piece.layers * section.planes for section in sections]
    rows = [1 if whole else section.rows for section in sections]
    scattered = sum(count * row * pages for count, row in zip(planes, rows, strict=True))
    layer, head = source.first_layer + piece.source_layer, source.first_head + piece.source_head
    return LegSize(
        p,
        d,
        (layer, layer + piece.layers - 1),
        (head, head + piece.heads - 1),
        pages * page_bytes(prefill.layout, piece),
        scattered,
        min(scattered, sum(planes)) if whole else scattered,
    )
