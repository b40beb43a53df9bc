"""A mooncake link: the writes towards one peer.

A write is cut into pieces. The link's engines have one of them at a time for each of their connections
(``backends.mooncake_connections``), of the link's transfers in turn; the link gives them the next when one
has ended. Whoever polls any transfer of the link does that for all of them: the next poll of another one
costs nothing.

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
from typing import TYPE_CHECKING, Final

from backends.base import BackendError, Link, PeerDisconnectedError, TransferError
from backends.descriptors import check_parts
from backends.mooncake_transfer import MooncakeTransfer, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Part, Region, Transfer
    from backends.mooncake_connections import Connections
    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_presence import Presence

logger = logging.getLogger(__name__)

#: Enough to keep the connections busy between two polls.
MAX_OUTSTANDING: Final = 16
_FENCE_WAIT_S: Final = 5.0
#: How long a peer may take to say that it is there, after a write failed.
_ANSWER_S: Final = 1.0
#: How long to let the engines work before they are asked again, while they have half of the bytes that they
#: may have, or more: asking takes cores from their connections. In turns with the bare engine, over loopback,
#: long runs gained a tenth by it. With short runs posting is what takes the time, and any rest costs.
_REST_S: Final = 0.001
_NONE_LEFT: Final = "none of its connections is left"
#: While nothing ends, the peer's presence is looked at this often.
_LOOK_S: Final = 0.005


class MooncakeLink(Link):
    """Engines of its own, towards one incarnation of one peer."""

    def __init__(
        self,
        peer: str,
        connections: Connections,
        presence: Presence,
        local: Sequence[Region],
        remote: Endpoint,
    ) -> None:
        """Take over the connections and the presence; ``local`` is registered with the engines already."""
        self.peer = peer
        self._connections = connections
        # With fewer left it would be slow, and is over as soon as nothing moves.
        self._fewest = connections.left // 2
        self._presence = presence
        self._local = list(local)
        self._local_bytes = [region.size_bytes for region in local]
        self._remote = remote.regions
        self._remote_bytes = [region.size_bytes for region in remote.regions]
        self._moving: list[MooncakeTransfer] = []
        self._queue: deque[MooncakeTransfer] = deque()
        self._looked_s = 0.0
        # What was asked of the peer since a piece failed, and when; 0: nothing.
        self._question = 0
        self._asked_s = 0.0
        self._lock = threading.Lock()
        self.fenced = False
        # Why nothing is posted any more; it is not fenced yet when its engines could not be destroyed.
        self._end = ""

    @property
    def rest_s(self) -> float:
        """How long the engines are busy at least with what they have, in seconds; 0 when that is not sure."""
        return _REST_S if self._connections.is_busy else 0.0

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        check_parts(parts, self._local_bytes, self._remote_bytes)
        with self._lock:
            if not self._end:
                self._look()
            if self._end:
                message = f"{self._end}; connect anew"
                raise PeerDisconnectedError(message)
            if len(self._moving) >= MAX_OUTSTANDING:
                message = f"{len(self._moving)} transfers to {self.peer} are outstanding already"
                raise TransferError(message)
            transfer = MooncakeTransfer(self, cut(parts, self._local, self._remote))
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
                if self._end:
                    self._lose(self._end)
                else:
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
            self._fence(f"the link to {self.peer} was fenced")
        finally:
            self._lock.release()

    # --- what follows is called with the lock held ---------------------------------------------

    def _advance(self) -> None:
        """Ask the engines after all that they have, act on it, and give them more."""
        for transfer in self._moving:
            transfer.asked = False
        ended = self._sweep()
        if ended or self._question or time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        if self._question and not self._end:
            self._judge()
        if not self._end:
            self._feed()
            self._settle()

    def _sweep(self) -> bool:
        """Ask once after each piece that the engines have; whether any has ended."""
        ends = self._connections.ended()
        for transfer, done in ends:
            transfer.in_engine -= 1
            if done:
                transfer.progress += 1
            else:
                self._break(transfer)
        return bool(ends)

    def _feed(self) -> None:
        """Give the engines pieces up to their limits. The peer's presence was looked at just before."""
        connections, queue = self._connections, self._queue
        while queue and connections.has_room and not self._question:
            transfer = queue[0]
            piece = next(transfer.pieces, None)
            if piece is None:
                transfer.waiting = False
                queue.popleft()
                continue
            try:
                connections.submit(transfer, piece)
            except BackendError as error:
                logger.warning("a write to %s: %s", self.peer, error)
                self._break(transfer)
                return
            transfer.in_engine += 1
            # In turn, so that none of them stands still.
            queue.rotate(-1)

    def _settle(self) -> None:
        """End the transfers of which nothing is left and nothing is in doubt."""
        for transfer in tuple(self._moving):
            in_doubt = transfer.broken and transfer.error is None
            if not transfer.waiting and not transfer.in_engine and not in_doubt:
                self._moving.remove(transfer)
                transfer.end(None)
        if not self._moving and self._connections.left < self._fewest:
            self._lose(f"only {self._connections.left} of its connections are left")

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
            logger.warning("%d of the connections to %s are left", self._connections.left, self.peer)
            if self._connections.left == 0:
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
        again = bool(self._end)
        try:
            self._fence(f"the link to {self.peer} is over: {why}")
        except BackendError:
            # Its transfers stay unsettled. Each poll tries again; the owner's own fence will say it again.
            if not again:
                logger.exception("the link to %s is dead and cannot be fenced", self.peer)

    def _fence(self, why: str) -> None:
        """Destroy the engines; every transfer that moves ends with ``why``, or why it was over before."""
        if self.fenced:
            return
        self._end = self._end or why
        self._connections.destroy()
        self._presence.close()
        self.fenced = True
        for transfer in self._moving:
            transfer.end(PeerDisconnectedError(self._end))
        self._moving.clear()
        self._queue.clear()
