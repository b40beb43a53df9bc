"""A lane: the thread that moves pages to one peer.

Theory of operation
    The host's thread puts moves and notes in (``coordinator.worker.jobs``); the lane's own thread
    does everything that may block, and owns the link. A call that does not return holds up this
    lane and nothing else.

    Each turn the thread takes its commands, and has the moves posted and asked after
    (``coordinator.worker.mover``). Then it sleeps, if nothing is to be posted; a command wakes it at once.

    A link that says that the peer is gone is fenced at once, for nothing more can come of it. One that
    cannot be fenced is kept, and holds what it had moving, until it can be.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from backends.base import BackendError
from coordinator.errors import LayoutError, PoolError
from coordinator.messages import (
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
    MoveFailed,
    Revoke,
)
from coordinator.worker.jobs import JobQueue
from coordinator.worker.mover import CONNECT, DISCONNECTED, MAX_TEXT, REVOKED, TRANSPORT, Mover
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from backends.base import Backend, Link
    from coordinator.messages import Move, Report
    from coordinator.worker.jobs import Note
    from coordinator.worker.settings import Budget

_log = logging.getLogger(__name__)


class Lane:
    """Moves pages to one peer, in a thread of its own.

    The public methods are for the host's thread and return at once. What comes of them is told
    through ``report``, which is called from both threads.
    """

    def __init__(
        self,
        peer: str,
        backend: Backend,
        ours: RankPool,
        budget: Budget,
        report: Callable[[Report], None],
        crashed: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            peer: the decode rank that the lane leads to.
            backend: started, with our pool registered as region 0.
            ours: the geometry of our pool.
            budget: how much the backend gets at once.
            report: hears of everything, from any thread.
            crashed: called in an ``except`` block when the lane's thread ends by an exception
                that no backend may raise. What moves then is in nobody's hands.

        """
        self.peer = peer
        self._backend = backend
        self._ours = ours
        self._report = report
        self._crashed = crashed
        self._jobs = JobQueue(peer)
        # What follows belongs to the lane's thread alone.
        most_moving = backend.capabilities.max_outstanding_per_peer
        self._mover = Mover(peer, self._jobs, most_moving, budget, report)
        self._connected_to: ConnectPeer | None = None
        self._unfenced: list[Link] = []
        self._fenced = False
        self._told_unfenced = ""
        self._thread = threading.Thread(target=self._run, name=f"lane {peer}", daemon=True)
        self._thread.start()

    # --- for the host's thread ----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the lane was fenced and is over: it accepts nothing any more."""
        return self._jobs.closed

    def connect(self, command: ConnectPeer) -> bool:
        """Open the link; false when the lane is closed."""
        return self._jobs.put(command)

    def fence(self) -> bool:
        """Destroy the link, fail all moves and end the lane; false when it is closed already."""
        return self._jobs.put(FencePeer(self.peer))

    def submit(self, move: Move) -> None:
        """Queue a move."""
        problem = self._jobs.add(move)
        if problem:
            kind = DISCONNECTED if self._jobs.closed else TRANSPORT
            self._report(MoveFailed(move.move, kind, problem, settled=True, started=False))

    def revoke(self, moves: Iterable[int]) -> None:
        """Fail those of the moves that this lane has.

        A move that has not begun fails here, even while the lane's thread hangs in a call.
        """
        for move in self._jobs.revoke(moves):
            self._report(MoveFailed(move, REVOKED, "revoked", settled=True, started=False))

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the lane's thread --------------------------------------------------------------------

    def _run(self) -> None:
        mover = self._mover
        try:
            while not (self._fenced and self._jobs.close_if_empty()):
                for note in self._jobs.notes(mover.sleep_s()):
                    self._obey(note)
                mover.post()
                mover.sweep()
                if mover.broken:
                    self._drop_link()
                if mover.got_on:
                    mover.tell_progress()
        except Exception:  # noqa: BLE001 - a thread must not die unseen; its host decides what follows
            self._crashed()

    def _obey(self, note: Note) -> None:
        match note:
            case None:
                # A move was queued: we are awake, which is all that it wanted.
                pass
            case ConnectPeer():
                self._connect(note)
            case FencePeer():
                self._fence()
            case Revoke(moves=moves):
                for move in moves:
                    job = self._jobs.get(move)
                    if job is not None and not job.failed:
                        self._mover.fail(job, REVOKED, "revoked")

    # --- links --------------------------------------------------------------------------------

    def _connect(self, command: ConnectPeer) -> None:
        self._fenced = False
        if self._mover.link is not None:
            if command == self._connected_to:
                self._mover.links += 1
                self._report(Connected(self.peer, 0.0))
                return
            self._mover.broken = f"{self.peer} was connected anew, elsewhere"
            self._drop_link()
        self._mover.links += 1
        theirs = RankPool(command.layout, command.world_size, command.rank, command.pages, command.regions)
        started_s = time.monotonic()
        try:
            self._mover.route = route(self._ours, theirs)
            self._mover.link = self._backend.connect(self.peer, command.endpoint)
        except (LayoutError, PoolError, BackendError) as error:
            message = f"{self.peer} could not be connected: {error}"[:MAX_TEXT]
            self._mover.down = (CONNECT, message)
            _log.warning("%s", message)
            self._report(ConnectFailed(self.peer, message))
        else:
            self._connected_to = command
            self._report(Connected(self.peer, time.monotonic() - started_s))

    def _drop_link(self) -> None:
        """The peer is gone: fail everything, and make quiet what still moves."""
        _log.warning("the link to %s is down: %s", self.peer, self._mover.broken)
        link = self._mover.lose_link(self._mover.broken)
        self._tell_unfenced(self._destroy([link] if link else []))

    def _fence(self) -> None:
        """Destroy every link. The lane ends then, unless there is more to do."""
        link = self._mover.lose_link(f"the link to {self.peer} was fenced")
        links, self._unfenced = self._unfenced, []
        problem = self._destroy([*links, link] if link else links)
        if not problem and self._mover.unsettled:
            problem = f"{self._mover.unsettled} transfers did not settle"
        self._fenced = not problem
        self._tell_unfenced(problem)
        self._report(Fenced(self.peer, problem[:MAX_TEXT]))

    def _destroy(self, links: Iterable[Link]) -> str:
        """Fence links and account for what has settled by that; what went wrong, or nothing."""
        problems = []
        for link in links:
            try:
                link.fence()
            except BackendError as error:
                self._unfenced.append(link)
                problems.append(str(error))
        self._mover.sweep()
        self._mover.broken = ""
        return "; ".join(problems)

    def _tell_unfenced(self, problem: str) -> None:
        """Say why links cannot be fenced, once for each text in a row: it is tried again and again."""
        if problem and problem != self._told_unfenced:
            _log.error("the link to %s cannot be fenced: %s", self.peer, problem)
        self._told_unfenced = problem
