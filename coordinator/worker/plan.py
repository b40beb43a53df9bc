"""From page lists to blocks: which bytes of one rank's pool go where in another's.

Theory of operation
    A ``Route`` is worked out once for a pair of ranks, from their layouts. It is one ``Strip`` for each
    section of a pool, or more where a pool has several regions. A strip is a grid of blocks on each
    side, and where the planes that travel begin on it. Where both ranks hold the same heads, a block is
    a whole page. Where they do not, it is the common heads of one row of a page, and the blocks are more,
    nothing else. Layers that are not common do not occur.

    A move is one outer sum, planes by the blocks of its pages, on each side. It is made in rectangles,
    each of which fits into one post; no Python loop runs over pages. Planes are the outer axis, because
    pages that follow one another in memory do so within a plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import Part
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import mismatches
from coordinator.messages import PAGE_BYTES
from coordinator.slices import slice_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import BlockIndex, Grid
    from coordinator.slices import Slice
    from coordinator.worker.places import Placed, RankPool
    from coordinator.worker.settings import Budget

_PAGE: Final = np.dtype("<i4")
_PAGE_UNSIGNED: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """A grid on each side, and where the planes that travel begin on it.

    Attributes:
        source: the grid in our pool.
        destination: the grid in the peer's pool.
        source_planes: int32, block number of page 0 of each plane in our pool.
        destination_planes: int32, of the same length, the same for the peer's pool.
        rows: blocks of each page in a plane.

    """

    source: Grid
    destination: Grid
    source_planes: BlockIndex
    destination_planes: BlockIndex
    rows: int = 1

    def parts(
        self, source_pages: BlockIndex, destination_pages: BlockIndex, budget: Budget
    ) -> Iterator[Part]:
        """Yield all blocks of all pages, each part small enough for a post of its own."""
        if not source_pages.size:
            return
        blocks = source_pages.size * self.rows
        most = max(1, min(budget.post_blocks, budget.post_bytes // self.source.block_bytes))
        # A plane that needs several parts is cut into equal ones, so that no post is left with a few blocks.
        columns = -(-blocks // -(-blocks // most))
        planes = max(1, most // columns)
        for column in range(0, blocks, columns):
            source_at = _blocks_of(source_pages, self.rows, column, column + columns)
            destination_at = _blocks_of(destination_pages, self.rows, column, column + columns)
            for plane in range(0, self.source_planes.size, planes):
                yield Part(
                    self.source,
                    np.add.outer(self.source_planes[plane : plane + planes], source_at).reshape(-1),
                    self.destination,
                    np.add.outer(self.destination_planes[plane : plane + planes], destination_at).reshape(-1),
                )


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How pages travel from one rank's pool to another's.

    Attributes:
        strips: what a page is made of; empty when this pair of ranks has nothing to move.
        source_pages: pages in our pool.
        destination_pages: pages in the peer's pool.

    """

    strips: tuple[Strip, ...]
    source_pages: int
    destination_pages: int

    def posts(self, source: bytes, destination: bytes, budget: Budget) -> Iterator[list[Part]]:
        """Check a move's packed page lists and yield its posts, each planned when it is asked for.

        Args:
            source: our pages, packed little-endian int32.
            destination: the peer's pages, as many, packed in the same way.
            budget: the bounds of a post.

        Raises:
            PoolError: a list is not packed int32, names a page that its pool does not have, or the
                lists differ in length. It is raised here, not by the iterator.

        """
        source_pages = _unpack(source, self.source_pages, "source")
        destination_pages = _unpack(destination, self.destination_pages, "destination")
        if source_pages.size != destination_pages.size:
            message = f"{source_pages.size} source pages, {destination_pages.size} destination pages"
            raise PoolError(message)
        return self._posts(source_pages, destination_pages, budget)

    def _posts(
        self, source_pages: BlockIndex, destination_pages: BlockIndex, budget: Budget
    ) -> Iterator[list[Part]]:
        """Put parts together as long as they fit into one post."""
        post: list[Part] = []
        blocks = size_bytes = 0
        for strip in self.strips:
            for part in strip.parts(source_pages, destination_pages, budget):
                blocks += part.source_blocks.size
                size_bytes += part.size_bytes
                if post and (blocks > budget.post_blocks or size_bytes > budget.post_bytes):
                    yield post
                    post, blocks, size_bytes = [], part.source_blocks.size, part.size_bytes
                post.append(part)
        if post:
            yield post


def route(source: RankPool, destination: RankPool) -> Route:
    """Work out how pages travel from ``source`` to ``destination``.

    Raises:
        LayoutError: one of the layouts is impossible, they do not fit each other, or a pool has
            more blocks than an int32 can number.
        PoolError: there is no such rank in its group.

    """
    source.check()
    destination.check()
    problems = mismatches(source.layout, destination.layout)
    if problems:
        raise LayoutError("; ".join(problems))
    piece = slice_of(
        source.layout, source.world_size, source.rank,
        destination.layout, destination.world_size, destination.rank,
    )  # fmt: skip
    strips: tuple[Strip, ...] = ()
    if piece is not None:
        ours, theirs = source.sections(), destination.sections()
        strips = tuple(strip for pair in zip(ours, theirs, strict=True) for strip in _strips(piece, *pair))
    return Route(strips, source.pages, destination.pages)


def _strips(piece: Slice, ours: Placed, theirs: Placed) -> Iterator[Strip]:
    """Yield the strips of a section: one, or as many as there are pieces between the ends of regions."""
    planes = ours.section.planes
    first, there, count = piece.source_layer * planes, piece.destination_layer * planes, piece.layers * planes
    whole = piece.heads == ours.heads == theirs.heads
    rows = 1 if whole else ours.section.rows
    cuts = [
        plane for plane in range(count)
        if not plane or not (first + plane) % ours.planes or not (there + plane) % theirs.planes
    ]  # fmt: skip
    for start, end in pairwise([*cuts, count]):
        region, other = (first + start) // ours.planes, (there + start) // theirs.planes
        if whole:
            grids = ours.page_grid(region), theirs.page_grid(other)
        else:
            # What is common to both is less than a row on one of them.
            grids = (
                ours.row_grid(region, piece.source_head, piece.heads),
                theirs.row_grid(other, piece.destination_head, piece.heads),
            )
        yield Strip(
            *grids,
            ours.firsts(first + start, end - start, rows),
            theirs.firsts(there + start, end - start, rows),
            rows,
        )


def _blocks_of(pages: BlockIndex, rows: int, start: int, end: int) -> BlockIndex:
    """Blocks ``start`` to ``end`` of those that pages have within a plane, each ``rows`` of them.

    Only these are made: all of them would be many times as large as the list of pages.
    """
    if rows == 1:
        return pages[start:end]
    first, last = start // rows, -(-end // rows)
    blocks: BlockIndex = np.add.outer(
        pages[first:last] * np.int32(rows), np.arange(rows, dtype=np.int32)
    ).reshape(-1)
    return blocks[start - first * rows : end - first * rows]


def _unpack(packed: bytes, pages: int, side: str) -> BlockIndex:
    """Page numbers as an int32 array, all of them in the pool."""
    if len(packed) % PAGE_BYTES:
        message = f"the {side} page list has {len(packed)} bytes: not a multiple of {PAGE_BYTES}"
        raise PoolError(message)
    # Read as unsigned, a negative number is beyond the end of every pool.
    numbers = np.frombuffer(packed, _PAGE_UNSIGNED)
    if numbers.size and np.maximum.reduce(numbers) >= pages:
        first = int(np.flatnonzero(numbers >= pages)[0])
        page = int(np.frombuffer(packed, _PAGE)[first])
        message = f"{side} page {page} (number {first} of the list) is not in the pool of {pages} pages"
        raise PoolError(message)
    return numbers.view(_PAGE)
