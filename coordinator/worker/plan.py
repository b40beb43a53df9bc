"""From page lists to blocks: which bytes of one rank's pool go where in another's.

Theory of operation
    A ``Route`` is worked out once for a pair of ranks, from their layouts. It is one ``Strip`` for each
    section of a pool, or more where a pool has several regions. A strip is a grid of blocks on each
    side, and where the planes that travel begin on it. Where both ranks hold the same heads, a block is
    a whole page. Where they do not, it is the common heads of one row of a page, and the blocks are more,
    nothing else. Layers that are not common do not occur.

    Pages that follow one another on both sides are a run, and so are their blocks in each plane. A move
    is one outer sum on each side, planes by runs. It is made in rectangles, each of which fits into one
    post; no Python loop runs over pages, and where runs are long nothing here is as long as their lists.
    Planes are the outer axis, because pages that follow one another in memory do so within a plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.base import Part
from backends.descriptors import runs_of
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
#: Runs that are summed up at once: more than fit into one post where each has few, but all within a cache.
_RUNS_AT_ONCE: Final = 16384
#: Among so few it takes longer to look for runs than it saves: backends find those of short lists.
_FEW_PAGES: Final = 64


class Runs(NamedTuple):
    """Blocks of a plane that follow one another on both sides.

    Attributes:
        source: int32, the first one of each run on our side.
        destination: int32, the same on the peer's side.
        lengths: int32, of each run; None: each is one block.
        blocks: how many they are in all.

    """

    source: BlockIndex
    destination: BlockIndex
    lengths: BlockIndex | None
    blocks: int


def _columns(source: BlockIndex, destination: BlockIndex, rows: int, most: int) -> list[Runs]:
    """Find the blocks that pages have in a plane, ``rows`` of each, in columns of at most ``most`` blocks.

    The columns are equal, so that no post is left with a few blocks.
    """
    blocks = source.size * rows
    if rows == 1 and blocks <= min(most, _FEW_PAGES):
        return [Runs(source, destination, None, blocks)]
    source, destination, lengths = (array * np.int32(rows) for array in runs_of(source, destination))
    if blocks <= most:
        return [Runs(source, destination, lengths, blocks)]
    width = -(-blocks // -(-blocks // most))
    # Cut the runs wherever a column begins: ``cuts`` is where, counted in blocks, each piece begins.
    begins = np.cumsum(lengths) - lengths
    edges = np.arange(0, blocks, width)
    cuts = np.union1d(begins, edges)
    run = np.searchsorted(begins, cuts, "right") - 1
    within = (cuts - begins[run]).astype(np.int32)
    source, destination = source[run] + within, destination[run] + within
    ends = np.append(cuts[1:], blocks)
    lengths = (ends - cuts).astype(np.int32)
    firsts = [*np.searchsorted(cuts, edges).tolist(), cuts.size]
    return [
        Runs(source[a:b], destination[a:b], lengths[a:b], int(ends[b - 1] - cuts[a]))
        for a, b in pairwise(firsts)
    ]


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

    def most(self, budget: Budget) -> int:
        """Blocks that fit into one post."""
        return max(1, min(budget.post_blocks, budget.post_bytes // self.source.block_bytes))

    def parts(self, column: Runs, most: int) -> Iterator[tuple[Part, int]]:
        """Yield a column in all planes, in parts of at most ``most`` blocks, each with their number."""
        size, lengths = column.source.size, column.lengths
        planes = min(max(1, most // column.blocks), self.source_planes.size)
        if lengths is not None and planes > 1:
            lengths = np.tile(lengths, planes)
        runs = planes * size
        step = planes * max(1, _RUNS_AT_ONCE // runs)
        for plane in range(0, self.source_planes.size, step):
            sources = np.add.outer(self.source_planes[plane : plane + step], column.source)
            destinations = np.add.outer(self.destination_planes[plane : plane + step], column.destination)
            whole = len(sources) - len(sources) % planes
            # Rows of an array are cheaper than as many slices.
            pairs = zip(
                sources[:whole].reshape(-1, runs), destinations[:whole].reshape(-1, runs), strict=True
            )
            for here, there in pairs:
                yield Part(self.source, here, self.destination, there, lengths), planes * column.blocks
            if whole < len(sources):
                here, there = sources[whole:].reshape(-1), destinations[whole:].reshape(-1)
                each = None if lengths is None else lengths[: here.size]
                part = Part(self.source, here, self.destination, there, each)
                yield part, here.size // size * column.blocks


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
        for strip, column, most in self._columns(source_pages, destination_pages, budget):
            for part, count in strip.parts(column, most):
                part_bytes = count * part.source.block_bytes
                blocks += count
                size_bytes += part_bytes
                if post and (blocks > budget.post_blocks or size_bytes > budget.post_bytes):
                    yield post
                    post, blocks, size_bytes = [], count, part_bytes
                post.append(part)
        if post:
            yield post

    def _columns(
        self, source_pages: BlockIndex, destination_pages: BlockIndex, budget: Budget
    ) -> Iterator[tuple[Strip, Runs, int]]:
        """Yield the columns of each strip, with the most blocks of a part; most strips are alike in them."""
        if not source_pages.size:
            return
        known: dict[tuple[int, int], list[Runs]] = {}
        for strip in self.strips:
            kind = strip.rows, strip.most(budget)
            if kind not in known:
                known[kind] = _columns(source_pages, destination_pages, *kind)
            for column in known[kind]:
                yield strip, column, kind[1]


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
