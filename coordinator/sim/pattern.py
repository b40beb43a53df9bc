"""What stands in the pages: contents that only one page in the world may have.

Every 64-bit word of a page depends on the room, its generation (how often that room was used),
the position of the page in the room, the plane, the TP rank and the place in the page. So a page
that is missing, stale, foreign, shifted or torn is found, wherever it comes from.

A pool is seen as uint64 of shape (planes, pages, words of a page).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from coordinator.sim.errors import SimulationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pages = NDArray[np.int32]
    Words = NDArray[np.uint64]

WORD_BYTES = 8
#: Odd, so that its multiples do not repeat within 2**64.
_STRIDE = 0x9E3779B97F4A7C15
_PLANE_SHIFT = np.uint64(32)


def words_of(memory: NDArray[np.uint8], planes: int, pages: int) -> Words:
    """See a pool's bytes (one dimension) as uint64 of shape (planes, pages, words of a page), without a copy.

    Raises:
        SimulationError: a page is no whole number of words.

    """
    if memory.size % (planes * pages * WORD_BYTES):
        message = f"{memory.size} bytes are not {planes} x {pages} pages of whole {WORD_BYTES}-byte words"
        raise SimulationError(message)
    return memory.view(np.uint64).reshape(planes, pages, -1)


def aux_of(room: int, generation: int) -> bytes:
    """Make the side data (16 bytes) that travel with a room, as a first token would."""
    return blake2b(b"%d/%d" % (room, generation), digest_size=16, person=b"aux").digest()


class Pattern:
    """Writes and checks the pages of one rank's pool."""

    def __init__(self, words: Words, rank: int) -> None:
        """Remember the pool, as ``words_of`` shows it, and whose it is."""
        self._words = words
        self._rank = rank
        planes, _, page_words = words.shape
        self._planes = np.arange(planes, dtype=np.uint64)[:, None] << _PLANE_SHIFT
        self._ramp = np.arange(page_words, dtype=np.uint64) * np.uint64(_STRIDE)

    def fill(self, pages: Pages, room: int, generation: int, first: int = 0) -> None:
        """Write ``pages``, which are the room's positions ``first``, ``first + 1`` ... in order."""
        keys = self._keys(room, generation, first, pages.size)
        for plane, plane_keys in zip(self._words, keys, strict=True):
            plane[pages] = plane_keys[:, None] + self._ramp

    def wrong(self, pages: Pages, room: int, generation: int) -> Pages:
        """Which of the room's positions (int32, ascending) do not hold what they must, in any plane."""
        keys = self._keys(room, generation, 0, pages.size)
        bad = np.zeros(pages.size, dtype=np.bool_)
        # One plane at a time bounds the memory needed for the copies.
        for plane, plane_keys in zip(self._words, keys, strict=True):
            bad |= (plane[pages] != plane_keys[:, None] + self._ramp).any(axis=1)
        return np.flatnonzero(bad).astype(np.int32)

    def _keys(self, room: int, generation: int, first: int, count: int) -> Words:
        """One key for each plane and position, shape (planes, count); all differ within a room."""
        text = b"%d/%d/%d" % (room, generation, self._rank)
        seed = int.from_bytes(blake2b(text, digest_size=8, person=b"page").digest(), "little")
        positions = np.arange(first, first + count, dtype=np.uint64)
        return _mix((self._planes + positions) * np.uint64(_STRIDE) + np.uint64(seed))


def _mix(values: Words) -> Words:
    """Scatter 64-bit values one to one (the finish of the splitmix64 generator)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
