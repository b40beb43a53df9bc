"""From page lists to blocks: which bytes of one rank's pool go where in another's.

Theory of operation
    A ``Route`` is worked out once for a pair of ranks, from their layouts. It is one ``Strip`` for each
    section of a pool. A strip is a grid of blocks on each side, and where the planes that travel begin on
    it. Where both ranks hold the same heads, a block is a whole page. Where they do not, it is the common
    heads of one row of a page, and the blocks are more, nothing else. Layers that are not common do not
    occur.

    A move is one outer sum, planes by the blocks of its pages, on each side. It is made in rectangles,
    each of which fits into one post; no Python loop runs over pages. Planes are the outer axis, because
    pages that follow one another in memory do so within a plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import Grid, Part
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import mismatches
from coordinator.messages import PAGE_BYTES
from coordinator.slices import slice_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import BlockIndex
    from coordinator.layout import Layout, Section
    from coordinator.slices import Slice
    from coordinator.worker.settings import Budget

#: Block numbers are int32.
MAX_BLOCKS: Final = 2**31 - 1

_PAGE: Final = np.dtype("<i4")
_PAGE_UNSIGNED: Final = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class RankPool:
    """The geometry of one rank's pool.

    Attributes:
        layout: of its engine, over all ranks.
        world_size: ranks in its group.
        rank: its number there.
        pages: pages in the pool.

    """

    layout: Layout
    world_size: int
    rank: int
    pages: int

    def sections(self) -> tuple[Placed, ...]:
        """The sections of the pool, in order; the layout must have passed ``check``."""
        share = self.layout.share(self.world_size, self.rank)
        placed: list[Placed] = []
        offset_bytes = 0
        for section in self.layout.sections:
            placed.append(
                Placed(section, offset_bytes, share.layers * section.planes, self.pages, share.heads)
            )
            offset_bytes += placed[-1].size_bytes
        return tuple(placed)


@dataclass(frozen=True, slots=True)
class Placed:
    """A section of one rank's pool.

    Attributes:
        section: what it has in common with that of every rank.
        offset_bytes: where it starts in the region.
        planes: in it.
        pages: in each plane.
        heads: that the rank holds.

    """

    section: Section
    offset_bytes: int
    planes: int
    pages: int
    heads: int

    @property
    def row_bytes(self) -> int:
        """Length of a row: all heads of the rank."""
        return self.heads * self.section.head_bytes

    @property
    def size_bytes(self) -> int:
        """Length of the section."""
        return self.planes * self.pages * self.section.rows * self.row_bytes

    def page_grid(self) -> Grid:
        """Return the grid whose blocks are whole pages, all planes one after the other."""
        page_bytes = self.section.rows * self.row_bytes
        return Grid(0, self.offset_bytes, page_bytes, page_bytes, self._count(1))

    def row_grid(self, first_head: int, heads: int) -> Grid:
        """Return the grid whose blocks are some heads of each row."""
        offset_bytes = self.offset_bytes + first_head * self.section.head_bytes
        rows = self._count(self.section.rows)
        return Grid(0, offset_bytes, heads * self.section.head_bytes, self.row_bytes, rows)

    def firsts(self, first: int, count: int, rows: int = 1) -> BlockIndex:
        """Block numbers of page 0 in planes ``first``, ``first + 1`` ..., of ``rows`` blocks a page."""
        return np.arange(first, first + count, dtype=np.int32) * np.int32(self.pages * rows)

    def _count(self, blocks_each: int) -> int:
        """Blocks of a grid with so many in each page.

        Raises:
            LayoutError: an int32 cannot number them.

        """
        count = self.planes * self.pages * blocks_each
        if count > MAX_BLOCKS:
            blocks = f"{self.planes} planes x {self.pages} pages x {blocks_each} blocks"
            message = f"{blocks} must be at most {MAX_BLOCKS}"
            raise LayoutError(message)
        return count


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
        source_at = _blocks_of(source_pages, self.rows)
        destination_at = _blocks_of(destination_pages, self.rows)
        blocks = source_at.size
        most = max(1, min(budget.post_blocks, budget.post_bytes // self.source.block_bytes))
        # A plane that needs several parts is cut into equal ones, so that no post is left with a few blocks.
        columns = -(-blocks // -(-blocks // most))
        planes = max(1, most // columns)
        for plane in range(0, self.source_planes.size, planes):
            source_first = self.source_planes[plane : plane + planes]
            destination_first = self.destination_planes[plane : plane + planes]
            for column in range(0, blocks, columns):
                end = column + columns
                yield Part(
                    self.source,
                    np.add.outer(source_first, source_at[column:end]).reshape(-1),
                    self.destination,
                    np.add.outer(destination_first, destination_at[column:end]).reshape(-1),
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
    for pool in (source, destination):
        pool.layout.check(pool.world_size)
        if not 0 <= pool.rank < pool.world_size or pool.pages < 1:
            message = f"rank {pool.rank} of {pool.world_size} with {pool.pages} pages: there is no such pool"
            raise PoolError(message)
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
        strips = tuple(map(partial(_strip, piece), ours, theirs))
    return Route(strips, source.pages, destination.pages)


def _strip(piece: Slice, ours: Placed, theirs: Placed) -> Strip:
    """Work out a strip: of whole pages where the leg carries all heads of both ranks, else of cut rows."""
    planes = ours.section.planes
    count = piece.layers * planes
    first, theirs_first = piece.source_layer * planes, piece.destination_layer * planes
    if piece.heads == ours.heads == theirs.heads:
        return Strip(
            ours.page_grid(),
            theirs.page_grid(),
            ours.firsts(first, count),
            theirs.firsts(theirs_first, count),
        )
    rows = ours.section.rows
    return Strip(
        ours.row_grid(piece.source_head, piece.heads),
        theirs.row_grid(piece.destination_head, piece.heads),
        ours.firsts(first, count, rows),
        theirs.firsts(theirs_first, count, rows),
        rows,
    )


def _blocks_of(pages: BlockIndex, rows: int) -> BlockIndex:
    """The blocks of pages within a plane, in which each page has ``rows`` of them."""
    if rows == 1:
        return pages
    blocks: BlockIndex = np.add.outer(pages * np.int32(rows), np.arange(rows, dtype=np.int32)).reshape(-1)
    return blocks


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
