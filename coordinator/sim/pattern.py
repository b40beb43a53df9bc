"""What stands in the pages: contents that only one place in the world may have.

Every word of a page depends on the room, its generation (how often that room was used), the position of
the page in the room, the plane, the row, the head and the place in the head; planes and heads are counted
over the whole model. So a page, or a part of one, that is missing, stale, foreign, shifted or torn is
found, wherever it comes from; and engines of unequal size have the same contents.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.layout import Layout

    Pages = NDArray[np.int32]
    Keys = NDArray[np.uint64]

Words = NDArray[np.unsignedinteger]

_WIDEST = 8
#: Odd, so that its multiples do not repeat within 2**64.
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_PLANE_SHIFT = np.uint64(32)
#: Sections are told apart by the highest bits of a plane's number.
_SECTION_SHIFT = 28


class Section(NamedTuple):
    """A section of a pool.

    Attributes:
        words: unsigned integers of shape (planes, pages, rows, heads, words of a head), a view.
        planes: the planes' numbers, over the whole model and all sections.
        places: of each word within the page of a model with all heads, shape (rows, heads, words).

    """

    words: Words
    planes: Keys
    places: Keys


def sections_of(
    buffers: Sequence[NDArray[np.uint8]], layout: Layout, world_size: int, rank: int, pages: int
) -> list[Section]:
    """See a rank's pool, which is a buffer of bytes for each section of the layout, as words."""
    share = layout.share(world_size, rank)
    found = []
    for number, (buffer, section) in enumerate(zip(buffers, layout.sections, strict=True)):
        width = math.gcd(section.head_bytes, _WIDEST)
        count = section.head_bytes // width
        planes = share.layers * section.planes
        shape = (planes, pages, section.rows, share.heads, count)
        first_plane = (number << _SECTION_SHIFT) + share.first_layer * section.planes
        places = np.arange(section.rows * layout.kv_heads * count, dtype=np.uint64)
        heads = slice(share.first_head, share.first_head + share.heads)
        found.append(
            Section(
                buffer.reshape(-1).view(f"u{width}").reshape(shape),
                np.arange(first_plane, first_plane + planes, dtype=np.uint64),
                places.reshape(section.rows, layout.kv_heads, count)[:, heads],
            )
        )
    return found


def aux_of(room: int, generation: int) -> bytes:
    """Make the side data (16 bytes) that travel with a room, as a first token would."""
    return blake2b(b"%d/%d" % (room, generation), digest_size=16, person=b"aux").digest()


class Pattern:
    """Writes and checks the pages of one rank's pool."""

    def __init__(self, sections: list[Section]) -> None:
        """Remember the pool, as ``sections_of`` shows it."""
        self._sections = [(words, planes, places * _STRIDE) for words, planes, places in sections]

    def fill(self, pages: Pages, room: int, generation: int, first: int = 0) -> None:
        """Write ``pages``, which are the room's positions ``first``, ``first + 1`` ... in order."""
        for words, planes, ramp in self._sections:
            for plane, keys in zip(words, keys_of(planes, room, generation, first, pages.size), strict=True):
                plane[pages] = contents(keys, ramp, plane.dtype)

    def wrong(self, pages: Pages, room: int, generation: int) -> Pages:
        """Which of the room's positions (int32, ascending) do not hold what they must, in any plane."""
        bad = np.zeros(pages.size, dtype=np.bool_)
        for words, planes, ramp in self._sections:
            # One plane at a time bounds the memory needed for the copies.
            for plane, keys in zip(words, keys_of(planes, room, generation, 0, pages.size), strict=True):
                bad |= (plane[pages] != contents(keys, ramp, plane.dtype)).any(axis=(1, 2, 3))
        return np.flatnonzero(bad).astype(np.int32)


def keys_of(planes: Keys, room: int, generation: int, first: int, count: int) -> Keys:
    """One key for each plane and position, shape (planes, count); all differ within a room."""
    text = b"%d/%d" % (room, generation)
    seed = int.from_bytes(blake2b(text, digest_size=8, person=b"page").digest(), "little")
    positions = np.arange(first, first + count, dtype=np.uint64)
    return _mix(((planes[:, None] << _PLANE_SHIFT) + positions) * _STRIDE + np.uint64(seed))


def contents(keys: Keys, ramp: Keys, kind: np.dtype[np.unsignedinteger]) -> Words:
    """What the pages of one plane hold: shape (pages, rows, heads, words)."""
    values = keys[:, None, None, None] + ramp
    # Narrow words have only the low bits, which must depend on all others then.
    return values if kind.itemsize == _WIDEST else _mix(values).astype(kind)


def _mix(values: Keys) -> Keys:
    """Scatter 64-bit values one to one (the finish of the splitmix64 generator)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
