"""What a bare engine is for the bandwidth bench: its raw library, used the way an expert would.

Nothing of ``backends`` is in the way of the bytes; it only loads the native modules, so that engine and
environment are those of the worker. A ``Receiver`` registers memory and has an address; a ``Sender``
meets it and writes pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from numpy.typing import NDArray

#: How long to sleep between two questions after a transfer.
POLL_S: Final = 50e-6


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool as a bare engine sees it: equal blocks, ``planes`` times ``pages`` of them.

    Attributes:
        address: first byte.
        block_bytes: a page of one plane.
        planes: block ``plane * pages + page`` is the page in that plane.
        pages: pages in the pool.

    """

    address: int
    block_bytes: int
    planes: int
    pages: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.planes * self.pages

    @property
    def size_bytes(self) -> int:
        """Length."""
        return self.count * self.block_bytes

    def blocks(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """The blocks of these pages, int32, plane by plane."""
        starts = np.arange(self.planes, dtype=np.int32) * np.int32(self.pages)
        blocks: NDArray[np.int32] = np.add.outer(starts, pages).reshape(-1)
        return blocks


class Receiver(Protocol):
    """Registered memory."""

    address: bytes

    def close(self) -> None:
        """Give the memory back."""


class Sender(Protocol):
    """An engine that has met one receiver."""

    def post(self, source_pages: NDArray[np.int32], destination_pages: NDArray[np.int32]) -> object:
        """Start to write pages; returns what ``done`` takes."""

    def done(self, transfer: object) -> bool:
        """Whether all of it has arrived; makes the engine go on."""

    def close(self) -> None:
        """Give the memory back."""


def receiver(backend: str, options: Mapping[str, object], memory: Memory) -> Receiver:
    """Start the receiving side of a backend's engine.

    Raises:
        ImportError: it is not installed.

    """
    return cast("Receiver", _module(backend).Receiver(options, memory))


def sender(backend: str, options: Mapping[str, object], memory: Memory, address: bytes) -> Sender:
    """Start the sending side, and meet the receiver at ``address``, whose pool has the same geometry.

    Raises:
        ImportError: the engine is not installed.

    """
    return cast("Sender", _module(backend).Sender(options, memory, address))


def _module(backend: str) -> ModuleType:
    return import_module(f"scripts.benches.support.bare_{backend}")
