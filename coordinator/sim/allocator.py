"""A deterministic page allocator: the same calls on every rank give the same pages.

The pages given back last are handed out first, so that a write that comes too late hits a page
that is in use again as soon as possible. That is what a simulation wants.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from coordinator.sim.errors import AllocationError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    Pages = NDArray[np.int32]

DIGEST_BYTES = 16


class PageAllocator:
    """Pages 0 ... ``pages - 1``, each free or held by one owner."""

    def __init__(self, pages: int) -> None:
        """All pages are free at first; page 0 is handed out first.

        Raises:
            AllocationError: ``pages`` is below 1.

        """
        if pages < 1:
            message = f"a pool of {pages} pages cannot be allocated from; it needs at least 1"
            raise AllocationError(message)
        self.pages = pages
        self._stack: Pages = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._free = pages
        self._held: dict[Hashable, Pages] = {}

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return self._free

    @property
    def owners(self) -> tuple[Hashable, ...]:
        """Who holds pages, in the order in which they took them."""
        return tuple(self._held)

    def take(self, owner: Hashable, count: int) -> Pages | None:
        """Give ``count`` pages (int32, in order of use) to ``owner``; None when too few are free.

        Raises:
            AllocationError: ``owner`` holds pages already, or ``count`` can never be met.

        """
        if owner in self._held:
            message = f"{owner} holds pages already"
            raise AllocationError(message)
        if not 1 <= count <= self.pages:
            message = f"{owner} asks for {count} pages, the pool has {self.pages}"
            raise AllocationError(message)
        if count > self._free:
            return None
        pages = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._held[owner] = pages
        return pages

    def give_back(self, owner: Hashable) -> None:
        """Free all pages of ``owner``.

        Raises:
            AllocationError: ``owner`` holds no pages.

        """
        pages = self._held.pop(owner, None)
        if pages is None:
            message = f"{owner} holds no pages"
            raise AllocationError(message)
        self._stack[self._free : self._free + pages.size] = pages
        self._free += pages.size

    def digest(self) -> bytes:
        """16 bytes that differ when the state does: free pages and their order, owners and theirs."""
        state = blake2b(self._stack[: self._free].tobytes(), digest_size=DIGEST_BYTES)
        for owner, pages in self._held.items():
            state.update(repr(owner).encode())
            state.update(pages.tobytes())
        return state.digest()
