"""A pool of which every word is known: what we wrote into each page, until somebody else writes there."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from coordinator.sim.pattern import Pattern

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.sim.pattern import Words

    Pages = NDArray[np.int32]


class Contents(Pattern):
    """Writes pages, remembers what, and finds words that do not belong there."""

    def __init__(self, words: Words, rank: int, ours: int) -> None:
        """``ours`` stands for a room in what we write for ourselves; every owner of a pool has another."""
        super().__init__(words, rank)
        self._ours = ours
        self._uses = count(1)
        planes, pages, _ = words.shape
        # One key for each plane and page.
        self._written: Words = np.zeros((planes, pages), dtype=np.uint64)
        self.everything: Pages = np.arange(pages, dtype=np.int32)
        self.use(self.everything)

    def fill(self, pages: Pages, room: int, generation: int, first: int = 0) -> None:
        """Do as ``Pattern.fill`` does, and remember it."""
        super().fill(pages, room, generation, first)
        self._written[:, pages] = self._keys(room, generation, first, pages.size)

    def use(self, pages: Pages) -> None:
        """Write something into ``pages`` that was never anywhere."""
        self.fill(pages, self._ours, next(self._uses))

    def changed(self, pages: Pages) -> Pages:
        """Which of ``pages`` do not hold what we wrote, whole."""
        bad = np.zeros(pages.size, dtype=np.bool_)
        for plane, words in enumerate(self._words):
            bad |= (words[pages] != self._written[plane, pages][:, None] + self._ramp).any(axis=1)
        return pages[bad]

    def foreign(self, pages: Pages, room: int, generation: int) -> Pages:
        """Which of ``pages`` have a byte that neither we wrote nor the room brings to that place.

        Bytes and not words: a write that was cut off may end anywhere.
        """
        bad = np.zeros(pages.size, dtype=np.bool_)
        brought = self._keys(room, generation, 0, pages.size)
        for plane, words in enumerate(self._words):
            held = words[pages]
            ours = self._written[plane, pages][:, None] + self._ramp
            theirs = brought[plane][:, None] + self._ramp
            where = np.nonzero((held != ours) & (held != theirs))
            octets, *known = (each[where].reshape(-1, 1).view(np.uint8) for each in (held, ours, theirs))
            wrong = ((octets != known[0]) & (octets != known[1])).any(axis=1)
            bad[where[0][wrong]] = True
        return pages[bad]
