"""A pool of which every word is known: what we wrote into each page, until somebody else writes there."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from coordinator.sim.pattern import Pattern, contents, keys_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.sim.pattern import Keys, Section

    Pages = NDArray[np.int32]


class Contents(Pattern):
    """Writes pages, remembers what, and finds words that do not belong there."""

    def __init__(self, sections: list[Section], ours: int) -> None:
        """``ours`` stands for a room in what we write for ourselves; every owner of a pool has another."""
        super().__init__(sections)
        self._ours = ours
        self._uses = count(1)
        pages = sections[0].words.shape[1]
        # In each section, one key for each plane and page.
        self._written: list[Keys] = [
            np.zeros((len(planes), pages), dtype=np.uint64) for _, planes, _ in sections
        ]
        self.everything: Pages = np.arange(pages, dtype=np.int32)
        self.use(self.everything)

    def fill(self, pages: Pages, room: int, generation: int, first: int = 0) -> None:
        """Do as ``Pattern.fill`` does, and remember it."""
        super().fill(pages, room, generation, first)
        for written, (_, planes, _) in zip(self._written, self._sections, strict=True):
            written[:, pages] = keys_of(planes, room, generation, first, pages.size)

    def use(self, pages: Pages) -> None:
        """Write something into ``pages`` that was never anywhere."""
        self.fill(pages, self._ours, next(self._uses))

    def changed(self, pages: Pages) -> Pages:
        """Which of ``pages`` do not hold what we wrote, whole."""
        bad = np.zeros(pages.size, dtype=np.bool_)
        for written, (words, _, ramp) in zip(self._written, self._sections, strict=True):
            for plane, keys in zip(words, written, strict=True):
                bad |= (plane[pages] != contents(keys[pages], ramp, plane.dtype)).any(axis=(1, 2, 3))
        return pages[bad]

    def foreign(self, pages: Pages, room: int, generation: int) -> Pages:
        """Which of ``pages`` have a byte that neither we wrote nor the room brings to that place.

        Bytes and not words: a write that was cut off may end anywhere.
        """
        bad = np.zeros(pages.size, dtype=np.bool_)
        for written, (words, planes, ramp) in zip(self._written, self._sections, strict=True):
            brought = keys_of(planes, room, generation, 0, pages.size)
            for plane, keys, others in zip(words, written, brought, strict=True):
                held = plane[pages]
                ours, theirs = (contents(each, ramp, plane.dtype) for each in (keys[pages], others))
                where = np.nonzero((held != ours) & (held != theirs))
                octets, *known = (each[where].reshape(-1, 1).view(np.uint8) for each in (held, ours, theirs))
                wrong = ((octets != known[0]) & (octets != known[1])).any(axis=1)
                bad[where[0][wrong]] = True
        return pages[bad]
