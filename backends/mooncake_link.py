"""A mooncake link: the writes towards one peer.

A write is cut into pieces, each a contiguous run. The engine has one of them at a time for each of its
connections, of the link's transfers in turn; the link gives it the next when one has ended. Whoever polls
any transfer of the link does that for all of them: the next poll of another one costs nothing.

Never more than one for each connection: a piece that waits for a connection would make the engine connect
again when the peer dies, to whatever process has the port by then. All connections were made, and the peer
was there after that, before the link was (``backends.mooncake_warmup``). One whose piece has failed does
not count any more, so what is posted always finds one that leads to the peer's process, or to nobody.

When a piece fails, the engine does not say why. So the link asks the peer (see
``backends.mooncake_presence``). An answer means that the write alone failed; none, or the news that
the peer has hung up, that the peer is lost. Until that is known, nothing more is posted, and the
transfer counts as moving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.base import (
    BackendError,
    Link,
    PeerDisconnectedError,
    Status,
    Transfer,
    TransferError,
)
from backends.descriptors import check_parts, merged_runs
from backends.mooncake_engine import LANES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from backends.base import Part, Region
    from backends.descriptors import Runs
    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_engine import Engine
    from backends.mooncake_presence import Presence

logger = logging.getLogger(__name__)

#: Enough to keep the connections busy between two polls.
MAX_OUTSTANDING: Final = 16
#: The most bytes that an engine has, but for the last piece: what a fence may find under way.
DEPTH_BYTES: Final = 16 << 20
#: Longer runs are cut, so that many connections have work, and what a fence cuts off is short. Measured over
#: loopback: 1 to 16 MiB are equally fast.
_PIECE_BYTES: Final = 1 << 20
_FENCE_WAIT_S: Final = 5.0
#: How long a peer may take to say that it is there, after a write failed.
_ANSWER_S: Final = 1.0
#: How long to let the engine work before it is asked again, while it has half of the bytes that it may have
#: or more: asking takes cores from its connections. In turns with the bare engine, over loopback, long runs
#: gained a tenth by it. With short runs posting is what takes the time, and any rest costs.
_REST_S: Final = 0.001
_NONE_LEFT: Final = "none of its connections is left"
#: While nothing ends, the peer's presence is looked at this often.
_LOOK_S: Final = 0.005


class Piece(NamedTuple):
    """A contiguous copy.

    Attributes:
        source: address in this process.
        destination: address in the peer.
        size_bytes: length.

    """

    source: int
    destination: int
    size_bytes: int


class MooncakeTransfer(Transfer):
    """A write: pieces that wait, and pieces that the engine has."""

    __slots__ = ("_link", "asked", "broken", "in_engine", "pieces", "waiting")

    def __init__(self, link: MooncakeLink, pieces: Iterator[Piece]) -> None:
        """Nothing is posted yet."""
        super().__init__()
        self._link = link
        self.pieces = pieces
        # Whether pieces are left.
        self.waiting = True
        self.in_engine = 0
        # It was polled since the engine was last asked, so it is what the engine is asked for next time.
        self.asked = True
        # A piece has failed.
        self.broken = False

    @property
    def rest_s(self) -> float:
        """See ``Transfer.rest_s``."""
        return self._link.rest_s

    def poll(self) -> Status:
        """See ``Transfer.poll``."""
        if not self.settled:
            self._link.advance(self)
        return self.status

    def end(self, error: BackendError | None) -> None:
        """Nothing moves any more: done, or failed with ``error`` unless it had failed before."""
        if error is not None and self.error is None:
            self.error = error
        self.status = Status.DONE if self.error is None else Status.FAILED
        self.settled = True
        self.waiting = False

    def fail(self, error: BackendError) -> None:
        """It failed, and something may still move."""
        self.error, self.status = error, Status.FAILED


class MooncakeLink(Link):
    """An engine of its own, towards one incarnation of one peer."""

    def __init__(
        self, peer: str, engine: Engine, presence: Presence, local: Sequence[Region], remote: Endpoint
    ) -> None:
        """Take over the engine and the presence.

        ``local`` is registered with the engine already, and all its connections are made.
        """
        self.peer = peer
        self._engine = engine
        # Connections without a piece: to which of the peer's engines they lead. These take turns.
        self._idle = deque([remote.name(theirs) for theirs in remote.engines] * LANES)
        # With fewer left it would be slow, and is over as soon as nothing moves.
        self._fewest = len(self._idle) // 2
        self._presence = presence
        self._local = list(local)
        self._local_bytes = [region.size_bytes for region in local]
        self._remote = remote
        self._remote_bytes = [region.size_bytes for region in remote.regions]
        self._moving: list[MooncakeTransfer] = []
        self._queue: deque[MooncakeTransfer] = deque()
        # What the engine has, by id: whose it is, its length, and on which connection.
        self._pieces: dict[int, tuple[MooncakeTransfer, int, str]] = {}
        self._engine_bytes = 0
        self._looked_s = 0.0
        # What was asked of the peer since a piece failed, and when; 0: nothing.
        self._question = 0
        self._asked_s = 0.0
        self._lock = threading.Lock()
        self.fenced = False
        # Why it was.
        self._end = ""

    @property
    def rest_s(self) -> float:
        """How long the engine is busy at least with what it has got, in seconds; 0 when that is not sure."""
        return _REST_S if 2 * self._engine_bytes >= DEPTH_BYTES else 0.0

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        check_parts(parts, self._local_bytes, self._remote_bytes)
        with self._lock:
            if not self.fenced:
                self._look()
            if self.fenced:
                message = f"{self._end}; connect anew"
                raise PeerDisconnectedError(message)
            if len(self._moving) >= MAX_OUTSTANDING:
                message = f"{len(self._moving)} transfers to {self.peer} are outstanding already"
                raise TransferError(message)
            # Merged now, because the caller's index arrays may change later.
            transfer = MooncakeTransfer(self, self._cut([(part, merged_runs(part)) for part in parts]))
            self._moving.append(transfer)
            self._queue.append(transfer)
            self._feed()
        return transfer

    def advance(self, transfer: MooncakeTransfer) -> None:
        """Go on with all transfers of the link, of which this one is not settled."""
        with self._lock:
            if transfer.settled:
                return
            if not transfer.asked:
                # As of the poll of another transfer, just now.
                transfer.asked = True
                return
            try:
                self._advance()
            except BackendError as error:
                self._lose(str(error))
            transfer.asked = True

    def fence(self) -> None:
        """See ``Link.fence``."""
        if not self._lock.acquire(timeout=_FENCE_WAIT_S):
            message = f"the link to {self.peer} is in a native call that does not return"
            raise BackendError(message)
        try:
            self._fence(PeerDisconnectedError(f"the link to {self.peer} was fenced"))
        finally:
            self._lock.release()

    # --- what follows is called with the lock held ---------------------------------------------

    def _cut(self, runs: Iterable[tuple[Part, Runs]]) -> Iterator[Piece]:
        """Cut merged parts into pieces."""
        for part, merged in runs:
            source_at = self._local[part.source.region].address
            destination_at = self._remote.regions[part.destination.region].address
            for source, destination, size_bytes in zip(*(array.tolist() for array in merged), strict=True):
                for offset in range(0, size_bytes, _PIECE_BYTES):
                    yield Piece(
                        source_at + source + offset,
                        destination_at + destination + offset,
                        min(_PIECE_BYTES, size_bytes - offset),
                    )

    def _advance(self) -> None:
        """Ask the engine after all that it has, act on it, and give it more."""
        for transfer in self._moving:
            transfer.asked = False
        ended = self._sweep()
        if ended or self._question or time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        if self._question and not self.fenced:
            self._judge()
        if not self.fenced:
            self._feed()
            self._settle()

    def _sweep(self) -> bool:
        """Ask once after each piece that the engine has; whether any has ended."""
        ends = self._engine.ended(self._pieces)
        for number, done in ends:
            transfer, size_bytes, connection = self._pieces.pop(number)
            transfer.in_engine -= 1
            self._engine_bytes -= size_bytes
            if done:
                transfer.progress += 1
                self._idle.append(connection)
            else:
                self._break(transfer)
        return bool(ends)

    def _feed(self) -> None:
        """Give the engine pieces up to its limits. The peer's presence was looked at just before."""
        while self._queue and self._idle and self._engine_bytes < DEPTH_BYTES and not self._question:
            transfer = self._queue[0]
            piece = next(transfer.pieces, None)
            if piece is None:
                transfer.waiting = False
                self._queue.popleft()
                continue
            try:
                number = self._engine.submit(self._idle[0], *piece)
            except BackendError as error:
                logger.warning("a write to %s: %s", self.peer, error)
                self._break(transfer)
                return
            self._pieces[number] = (transfer, piece.size_bytes, self._idle.popleft())
            self._engine_bytes += piece.size_bytes
            transfer.in_engine += 1
            # In turn, so that none of them stands still.
            self._queue.rotate(-1)

    def _settle(self) -> None:
        """End the transfers of which nothing is left and nothing is in doubt."""
        for transfer in tuple(self._moving):
            in_doubt = transfer.broken and transfer.error is None
            if not transfer.waiting and not transfer.in_engine and not in_doubt:
                self._moving.remove(transfer)
                transfer.end(None)
        if not self._moving and self._left() < self._fewest:
            self._lose(f"only {self._left()} of its connections are left")

    def _left(self) -> int:
        """How many connections have not failed."""
        return len(self._idle) + len(self._pieces)

    def _break(self, transfer: MooncakeTransfer) -> None:
        """A piece of it has failed: post no more of it, and ask the peer whether it is there."""
        transfer.broken = True
        if transfer.waiting:
            transfer.waiting = False
            self._queue.remove(transfer)
        self._question = self._presence.ask()
        self._asked_s = time.monotonic()

    def _judge(self) -> None:
        """Say why pieces have failed, once the peer has answered, or should have."""
        if self._presence.answers >= self._question:
            self._question = 0
            for transfer in self._moving:
                if transfer.broken and transfer.error is None:
                    message = (
                        f"a write to {self.peer} failed, though it is there; the engine's log is on stderr"
                    )
                    transfer.fail(TransferError(message))
            logger.warning("%d of the connections to %s are left", self._left(), self.peer)
            if self._left() == 0:
                self._lose(_NONE_LEFT)
        elif time.monotonic() - self._asked_s > _ANSWER_S:
            self._lose("a write failed, and it does not answer any more")

    def _look(self) -> None:
        """See whether the peer is there; if not, the link is over."""
        self._looked_s = time.monotonic()
        lost = self._presence.lost()
        if lost:
            self._lose(lost)

    def _lose(self, why: str) -> None:
        """Fence, because the link is of no use; nobody asked for it, so nobody is told when it fails."""
        try:
            self._fence(PeerDisconnectedError(f"the link to {self.peer} is over: {why}"))
        except BackendError:
            # Its transfers stay unsettled, and the owner's own fence will say it again.
            logger.exception("the link to %s is dead and cannot be fenced", self.peer)

    def _fence(self, error: PeerDisconnectedError) -> None:
        """Destroy the engine; every transfer that moves ends with ``error``."""
        if self.fenced:
            return
        self._engine.destroy()
        self._presence.close()
        self.fenced = True
        self._end = str(error)
        for transfer in self._moving:
            transfer.end(error)
        self._moving.clear()
        self._queue.clear()
        self._pieces.clear()
        self._idle.clear()
