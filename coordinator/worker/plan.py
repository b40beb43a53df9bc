"""From page lists to blocks: which bytes of one rank's pool go where in another's.

Theory of operation
    A ``Route`` is worked out once for a pair of ranks, from their layouts. It is a few ``Strip``s.
    A strip is a grid of blocks on each side, and the pieces that every page has on those grids:
    piece ``k`` of page ``g`` is block ``first[k] + g * step``. Where both sides have the same page
    size and heads, a piece is the whole page in one plane. Where they differ, it is a part of a
    page (the heads of one token, say), and the strips and pieces are more, nothing else.

    A move is one outer sum, pieces by pages, on each side. It is made in rectangles, each of which
    fits into one post; no Python loop runs over pages. Pieces are the outer axis, because pages that
    follow one another in memory do so within a plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import Grid, Part
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import mismatches
from coordinator.messages import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import BlockIndex
    from coordinator.layout import Layout
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


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """A grid on each side, and where the pieces of a page are on them.

    Attributes:
        source: the grid in our pool.
        destination: the grid in the peer's pool.
        source_first: int32, for each piece its block number in page 0 of our pool.
        destination_first: int32, of the same length, the same for the peer's pool.
        source_step: blocks from a page to the next one in our pool.
        destination_step: the same for the peer's pool.

    """

    source: Grid
    destination: Grid
    source_first: BlockIndex
    destination_first: BlockIndex
    source_step: int = 1
    destination_step: int = 1

    def parts(
        self, source_pages: BlockIndex, destination_pages: BlockIndex, budget: Budget
    ) -> Iterator[Part]:
        """Yield all pieces of all pages, each part small enough for a post of its own."""
        pages = source_pages.size
        if not pages:
            return
        most = max(1, min(budget.post_blocks, budget.post_bytes // self.source.block_bytes))
        # A long row is cut into equal lengths, so that no post is left with a few blocks only.
        columns = -(-pages // -(-pages // most))
        rows = max(1, most // columns)
        source_at, destination_at = source_pages, destination_pages
        if self.source_step != 1:
            source_at = source_pages * self.source_step
        if self.destination_step != 1:
            destination_at = destination_pages * self.destination_step
        for row in range(0, self.source_first.size, rows):
            source_first = self.source_first[row : row + rows]
            destination_first = self.destination_first[row : row + rows]
            for column in range(0, pages, columns):
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

    """
    source.layout.check(source.world_size)
    destination.layout.check(destination.world_size)
    problems = mismatches(source.layout, source.world_size, destination.layout, destination.world_size)
    if problems:
        raise LayoutError("; ".join(problems))
    strip = Strip(
        _page_grid(source), _page_grid(destination), _plane_starts(source), _plane_starts(destination)
    )
    return Route((strip,), source.pages, destination.pages)


def _page_grid(pool: RankPool) -> Grid:
    """Return the grid whose blocks are whole pages, all planes one after the other."""
    page_bytes = pool.layout.page_bytes(pool.world_size)
    count = pool.layout.planes * pool.pages
    if not 1 <= count <= MAX_BLOCKS:
        message = f"{pool.layout.planes} planes x {pool.pages} pages must be 1 to {MAX_BLOCKS} blocks"
        raise LayoutError(message)
    return Grid(0, 0, page_bytes, page_bytes, count)


def _plane_starts(pool: RankPool) -> BlockIndex:
    """Block number of page 0 in each plane of a grid of whole pages."""
    return np.arange(pool.layout.planes, dtype=np.int32) * np.int32(pool.pages)


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
