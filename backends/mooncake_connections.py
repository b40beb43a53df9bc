"""The engines of a mooncake link and their connections to the peer, each with one piece at a time at most.

Never more than one: a piece that waits for a connection would make the engine connect again when the peer
dies, to whatever process has the port by then. All connections were made, and the peer was there after that,
before the link was (``backends.mooncake_warmup``). One whose piece has failed does not count any more, so
what is posted always finds one that leads to the peer's process, or to nobody.

A link has two engines, because each has one thread for all of its connections: with short runs, that thread
is what everything waits for. Measured over loopback on two cores, with runs of 16 KiB: with one engine 0.87
to 1.0 of what the bare engine moves, with two 1.03 to 1.24; with three no more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.base import BackendError
from backends.mooncake_engine import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_engine import Engine
    from backends.mooncake_transfer import MooncakeTransfer, Piece

#: Engines of a link.
ENGINES: Final = 2
#: The most bytes that they have, but for the last piece: what a fence may find under way.
DEPTH_BYTES: Final = 16 << 20


def files_for_each(receivers: int) -> int:
    """How many connections, each a file, a peer with so many receiving engines has for each link to it."""
    return ENGINES * LANES * receivers


class Connection(NamedTuple):
    """One of an engine's connections to one of the peer's; which one, only the engine knows.

    Attributes:
        engine: ours.
        name: the peer's.

    """

    engine: Engine
    name: str


class Connections:
    """What a link's engines have to do. Not thread-safe."""

    def __init__(self, engines: Sequence[Engine], remote: Endpoint) -> None:
        """Take over the engines, which have made all connections to ``remote``."""
        names = [remote.name(theirs) for theirs in remote.engines]
        # These take turns.
        self._idle = deque([Connection(engine, name) for name in names for engine in engines] * LANES)
        # What each engine has, by id: whose it is, its length, and on which connection.
        self._pieces: dict[Engine, dict[int, tuple[MooncakeTransfer, int, Connection]]]
        self._pieces = {engine: {} for engine in engines}
        self._size_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether another piece may be submitted."""
        return self._size_bytes < DEPTH_BYTES and bool(self._idle)

    @property
    def is_busy(self) -> bool:
        """Whether the engines have half of the bytes that they may have, or more."""
        return 2 * self._size_bytes >= DEPTH_BYTES

    @property
    def left(self) -> int:
        """How many connections have not failed."""
        return len(self._idle) + sum(len(pieces) for pieces in self._pieces.values())

    def submit(self, transfer: MooncakeTransfer, piece: Piece) -> None:
        """Start a write of a checked piece. There must be room.

        Raises:
            BackendError: the engine refused it. Nothing was posted.

        """
        connection = self._idle[0]
        engine, name = connection
        number = engine.submit(name, *piece)
        self._idle.popleft()
        size_bytes = piece[2]
        self._pieces[engine][number] = (transfer, size_bytes, connection)
        self._size_bytes += size_bytes

    def ended(self) -> list[tuple[MooncakeTransfer, bool]]:
        """Ask once after each piece: of which transfers some have ended, and whether that is done.

        Raises:
            BackendError: an engine does not know, and no piece of the others has ended.

        """
        ends: list[tuple[MooncakeTransfer, bool]] = []
        problem = ""
        for engine, pieces in self._pieces.items():
            try:
                told = engine.ended(pieces)
            except BackendError as error:
                # As a text: the error holds the native engine, through its traceback.
                problem = str(error)
                continue
            for number, done in told:
                transfer, size_bytes, connection = pieces.pop(number)
                self._size_bytes -= size_bytes
                ends.append((transfer, done))
                if done:
                    self._idle.append(connection)
        # What has ended must be told; the next call comes to this again.
        if problem and not ends:
            raise BackendError(problem)
        return ends

    def destroy(self) -> None:
        """Destroy the engines: on return they read and write nothing any more.

        Raises:
            BackendError: naming all that cannot be destroyed.

        """
        problems = []
        for engine in self._pieces:
            try:
                engine.destroy()
            except BackendError as error:
                problems.append(str(error))
        if problems:
            raise BackendError("; ".join(problems))
        self._pieces.clear()
        self._idle.clear()
        self._size_bytes = 0
