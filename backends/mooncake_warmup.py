"""The first contact of mooncake engines with a peer's, before anything depends on it."""

from __future__ import annotations

import mmap
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import BackendError, Region
from backends.mooncake_engine import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.mooncake_endpoint import Endpoint, RemoteEngine
    from backends.mooncake_engine import Engine

_SCRAP_BYTES: Final = 8
_POLL_S: Final = 0.0002
#: An engine makes a connection when it has more to do than connections, one after the other.
_READS: Final = 4 * LANES


class Scrap:
    """A few bytes for others to read, and for what is read from them; every backend keeps one.

    Attributes:
        region: where they are.

    """

    def __init__(self) -> None:
        """Allocate them."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.region = Region(np.frombuffer(self._memory, np.uint8).ctypes.data, _SCRAP_BYTES)


class WarmUp:
    """Makes all connections of engines to a peer's engines: calls each, and reads the peer's scrap.

    From then on no engine connects any more, as long as it has no more to do at a time than it has
    connections. Reading harms nobody, whoever it is that listens there.

    In a thread, for either call takes a minute when the peer stops at that very moment. The thread holds
    the engines, and our scrap, as long as that lasts.
    """

    def __init__(self, engines: Sequence[Engine], remote: Endpoint, scrap: Scrap) -> None:
        """Begin; the engines are not to be used by others meanwhile, and have ``scrap`` registered."""
        self._engines = engines
        self._remote = remote
        self._scrap = scrap
        self._wanted = len(engines) * LANES * len(remote.engines) if remote.protocol == "tcp" else 0
        self._made = 0
        self._problem = ""
        self._over = threading.Event()
        # Whether nobody waits any more.
        self._left = False
        threading.Thread(target=self._run, name=f"mooncake meets {remote.agent}", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all connections are made.

        Raises:
            BackendError: the peer's engines do not answer, or not in time.

        """
        in_time = self._over.wait(timeout_s)
        self._left = True
        problem = self._problem if in_time else f"its engines did not answer within {timeout_s:g} s"
        if problem:
            message = f"{problem} ({self._made} of {self._wanted} connections are made)"
            raise BackendError(message)

    def _run(self) -> None:
        try:
            for engine in self._engines:
                for theirs in self._remote.engines:
                    if not self._left:
                        self._meet(engine, theirs)
        except BackendError as error:
            self._problem = str(error)
        self._over.set()

    def _meet(self, engine: Engine, theirs: RemoteEngine) -> None:
        """Call one of the peer's engines, and make the connections to it."""
        name = self._remote.name(theirs)
        engine.probe(name)
        before = self._made
        while not self._left:
            self._read(engine, name)
            self._made = before + engine.connections(self._remote.host, theirs.data_port)
            if self._made - before >= LANES or not self._wanted:
                return

    def _read(self, engine: Engine, name: str) -> None:
        """Read more at a time than there are connections, so that the engine makes those that it lacks."""
        ours, theirs = self._scrap.region.address, self._remote.scrap
        moving = {engine.submit_read(name, ours, theirs, _SCRAP_BYTES) for _ in range(_READS)}
        failed = False
        while moving and not self._left:
            for number, done in engine.ended(moving):
                moving.remove(number)
                failed = failed or not done
            time.sleep(_POLL_S)
        if failed:
            message = "its engine cannot be read, as the messages of ours say; may it open enough files?"
            raise BackendError(message)
