"""The ``loopback`` backend, which also notes when each write was done.

How it is found: as any backend of another package is, by an entry point (``install`` writes one).

A write says nothing of rooms; so the bench gives each handoff one page, and the moment is noted
under that page's number. Each worker has a file of its own, an array of int64 with the monotonic
clock's nanoseconds, 0 where nothing was written yet.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import Link, Status
from backends.loopback import LoopbackBackend
from backends.registry import ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from backends.base import Part, Transfer

NAME: Final = "stamped-loopback"
#: The option that says in which directory the files go; without it nothing is noted.
DIRECTORY: Final = "directory"
#: The option that says how many pages there are.
PAGES: Final = "pages"
_SUFFIX: Final = ".stamps"


class StampedLink(Link):
    """A link that notes when its writes are done."""

    def __init__(self, link: Link, done_ns: NDArray[np.int64]) -> None:
        """Write through ``link``; note in ``done_ns``, by page."""
        self.peer = link.peer
        self._link = link
        self._done_ns = done_ns

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``; here all bytes are in place when it returns."""
        transfer = self._link.write(parts)
        if transfer.status is Status.DONE:
            self._done_ns[parts[0].destination_blocks[0]] = time.monotonic_ns()
        return transfer

    def fence(self) -> None:
        """See ``Link.fence``."""
        self._link.fence()


class StampedLoopback(LoopbackBackend):
    """See the module."""

    name = NAME

    def __init__(self, agent: str, options: Mapping[str, object]) -> None:
        """See ``Backend``; the options are ``DIRECTORY`` and ``PAGES``."""
        own = dict(options)
        directory, pages = own.pop(DIRECTORY, None), own.pop(PAGES, 0)
        super().__init__(agent, own)
        self._done_ns: NDArray[np.int64] | None = None
        if directory is not None:
            file = Path(str(directory)) / f"{os.getpid()}{_SUFFIX}"
            self._done_ns = np.memmap(file, np.int64, "w+", shape=(int(str(pages)),))

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """See ``Backend.connect``."""
        link = super().connect(peer, endpoint)
        return link if self._done_ns is None else StampedLink(link, self._done_ns)


def install(directory: Path) -> None:
    """Make the backend known to every process that imports from ``directory``."""
    info = directory / "stamped_loopback-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stamped-loopback\nVersion: 0\n")
    target = f"{__name__}:{StampedLoopback.__name__}"
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{NAME} = {target}\n")


def done_s(directory: Path) -> NDArray[np.float64]:
    """When the last of all workers was done with each page, in seconds; 0 where none was."""
    files = np.stack([np.fromfile(file, np.int64) for file in directory.glob(f"*{_SUFFIX}")])
    return np.asarray(files.max(axis=0) / 1e9, np.float64)
