"""The host of a backend: one lane for each peer, commands in, reports out.

The same code in both hostings: a process of its own (``coordinator.worker.process``), or a thread
of the rank's process. It has no socket and no thread of its own, only its lanes have.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from coordinator.errors import PoolError
from coordinator.messages import ConnectFailed, ConnectPeer, Fenced, FencePeer, Move, MoveFailed, Revoke
from coordinator.worker.lane import Lane
from coordinator.worker.mover import CONNECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from backends.base import Backend, Region
    from coordinator.messages import Command, Report
    from coordinator.worker.places import RankPool
    from coordinator.worker.settings import Budget

_log = logging.getLogger(__name__)


class WorkerHost:
    """Moves one pool's pages to any number of peers.

    All methods are for one thread. Apart from ``start`` and ``close`` none of them blocks, whatever
    the backend does.
    """

    def __init__(
        self,
        backend: Backend,
        ours: RankPool,
        budget: Budget,
        report: Callable[[Report], None],
        crashed: Callable[[], None],
    ) -> None:
        """Take over a backend that was not started yet.

        Args:
            backend: moves the bytes.
            ours: the geometry of the pool that is sent from.
            budget: how much a lane hands to the backend at once.
            report: called with each report, from any thread; must not block or raise.
            crashed: called in an ``except`` block, on the thread of a lane that ends by an exception
                that no backend may raise. What it had moving is in nobody's hands then: only the
                end of the process makes it quiet.

        """
        self._backend = backend
        self._ours = ours
        self._budget = budget
        self._report = report
        self._crashed = crashed
        self._lanes: dict[str, Lane] = {}

    def start(self, regions: Sequence[Region]) -> None:
        """Start the backend, and register the pool's regions.

        Raises:
            PoolError: they are not as many, or not as large, as the layout says.
            LayoutError: the layout is impossible.
            BackendError: the backend cannot be started, or refuses the memory.

        """
        ours = self._ours
        ours.check()
        needed = ours.region_bytes()
        if len(regions) != ours.regions or any(region.size_bytes != needed for region in regions):
            sizes = ", ".join(str(region.size_bytes) for region in regions)
            message = f"the pool has {sizes} bytes, {ours.pages} pages need {ours.regions} x {needed}"
            raise PoolError(message)
        self._backend.start(sends=True)
        for region in regions:
            self._backend.register(region)

    def obey(self, commands: Iterable[Command]) -> None:
        """Take commands, in order. What comes of them is reported."""
        for command in commands:
            match command:
                case Move():
                    self._move(command)
                case ConnectPeer():
                    self._connect(command)
                case Revoke(moves=moves):
                    for lane in self._lanes.values():
                        lane.revoke(moves)
                case FencePeer(peer=peer):
                    lane_to_fence = self._lanes.get(peer)
                    # Without a lane nothing is sent there, which is what was asked for.
                    if lane_to_fence is None or not lane_to_fence.fence():
                        self._report(Fenced(peer))

    def close(self, timeout_s: float) -> bool:
        """Fence all peers and close the backend, if the lanes end in time; whether they did.

        When they did not, the backend is left alone: a native call is still running in it.

        Raises:
            BackendError: the backend cannot be closed.

        """
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.fence()
        for lane in self._lanes.values():
            if not lane.join(max(0.0, deadline_s - time.monotonic())):
                _log.error("the lane to %s did not end within %g s", lane.peer, timeout_s)
                return False
        self._backend.close()
        return True

    def _move(self, move: Move) -> None:
        lane = self._lanes.get(move.peer)
        if lane is None:
            message = f"there is no link to {move.peer}: it was never connected, or was fenced"
            self._report(MoveFailed(move.move, CONNECT, message, settled=True, started=False))
        else:
            lane.submit(move)

    def _connect(self, command: ConnectPeer) -> None:
        lane = self._lanes.get(command.peer)
        if lane is not None and lane.connect(command):
            return
        # Peers come and go with each restart of a decode engine: forget those that were fenced.
        self._lanes = {peer: lane for peer, lane in self._lanes.items() if not lane.closed}
        try:
            lane = Lane(command.peer, self._backend, self._ours, self._budget, self._report, self._crashed)
        except RuntimeError as error:
            # The system has no more threads for us. The other lanes go on, and it may have one later.
            message = f"{command.peer} could not be connected: {error}"
            _log.error("%s", message)
            self._report(ConnectFailed(command.peer, message))
            return
        self._lanes[command.peer] = lane
        lane.connect(command)
