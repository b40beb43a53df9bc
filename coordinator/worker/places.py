"""Where the sections of one rank's pool lie, as grids of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import Grid
from coordinator.errors import LayoutError, PoolError

if TYPE_CHECKING:
    from backends.base import BlockIndex
    from coordinator.layout import Layout, Section, Share

#: Block numbers are int32.
MAX_BLOCKS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RankPool:
    """The geometry of one rank's pool.

    Attributes:
        layout: of its engine, over all ranks.
        world_size: ranks in its group.
        rank: its number there.
        pages: pages in the pool.
        regions: of how many regions it consists, each with the same number of whole planes, in order.

    """

    layout: Layout
    world_size: int
    rank: int
    pages: int
    regions: int = 1

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            LayoutError: the layout is impossible for such a group, or for so many regions.
            PoolError: there is no such rank in its group, or no page.

        """
        self.layout.check(self.world_size)
        if not 0 <= self.rank < self.world_size or self.pages < 1:
            message = f"rank {self.rank} of {self.world_size} with {self.pages} pages: there is no such pool"
            raise PoolError(message)
        planes = self._share.layers * self.layout.sections[0].planes
        if self.regions < 1 or planes % self.regions:
            message = f"{planes} planes cannot be shared out evenly over {self.regions} regions"
            raise LayoutError(message)
        if self.regions > 1 and self.layout.extras:
            message = f"a pool with extras must be in one piece, not in {self.regions} regions"
            raise LayoutError(message)

    @property
    def _share(self) -> Share:
        return self.layout.share(self.world_size, self.rank)

    def region_bytes(self) -> int:
        """Length of each region; the pool must have passed ``check``."""
        return self.layout.pool_bytes(self.pages, self.world_size, self.rank) // self.regions

    def sections(self) -> tuple[Placed, ...]:
        """The sections of the pool, in order; the pool must have passed ``check``."""
        share = self._share
        placed: list[Placed] = []
        offset_bytes = 0
        for section in self.layout.sections:
            planes = share.layers * section.planes // self.regions
            placed.append(Placed(section, offset_bytes, planes, self.pages, share.heads))
            offset_bytes += placed[-1].size_bytes
        return tuple(placed)


@dataclass(frozen=True, slots=True)
class Placed:
    """A section of one rank's pool.

    Attributes:
        section: what it has in common with that of every rank.
        offset_bytes: where it starts in each region.
        planes: in each region.
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
        """Length of the section in each region."""
        return self.planes * self.pages * self.section.rows * self.row_bytes

    def page_grid(self, region: int) -> Grid:
        """Return the grid of a region whose blocks are whole pages, its planes one after the other."""
        page_bytes = self.section.rows * self.row_bytes
        return Grid(region, self.offset_bytes, page_bytes, page_bytes, self._count(1))

    def row_grid(self, region: int, first_head: int, heads: int) -> Grid:
        """Return the grid of a region whose blocks are some heads of each row."""
        offset_bytes = self.offset_bytes + first_head * self.section.head_bytes
        rows = self._count(self.section.rows)
        return Grid(region, offset_bytes, heads * self.section.head_bytes, self.row_bytes, rows)

    def firsts(self, first: int, count: int, rows: int) -> BlockIndex:
        """Block numbers of page 0 in ``count`` planes of one region, from plane ``first`` on."""
        start = first % self.planes
        return np.arange(start, start + count, dtype=np.int32) * np.int32(self.pages * rows)

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
