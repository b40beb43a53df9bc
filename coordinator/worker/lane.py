"""A lane: the thread that moves pages to one peer.

Theory of operation
    The host's thread puts moves and notes in (``coordinator.worker.jobs``); the lane's own thread
    does everything that may block, and owns the link. A call that does not return holds up this
    lane and nothing else.

    Each turn the thread takes its commands, posts a little, asks after what is moving, and tells
    progress. Moves take turns, post by post, so that a huge one does not hold up a short one. A
    budget bounds what the engine has at a time, because it serves what it has in its own order.

    Between two turns in which nothing is to be posted, the thread sleeps for a small share of the time
    in which nothing has happened, not even a part of a post arrived: polling adds at most that share to
    any wait, and costs little while nothing moves. A command wakes it at once.

What is reported when
    A move ends with one ``MoveDone`` or ``MoveFailed``. One that failed is quiet once each of its
    posts is settled: ``MoveFailed.settled`` says so at once, or ``MoveSettled`` follows.
    A link that says that the peer is gone is fenced at once, for nothing more can come of it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from backends.base import BackendError, PeerDisconnectedError, Status
from coordinator.errors import LayoutError, PoolError
from coordinator.messages import (
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Progress,
    Revoke,
)
from coordinator.worker.jobs import JobQueue
from coordinator.worker.places import RankPool
from coordinator.worker.plan import Route, route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from backends.base import Backend, Link, Transfer
    from coordinator.messages import Move, Report
    from coordinator.worker.jobs import Job, Note
    from coordinator.worker.settings import Budget

#: Progress is told at most this often.
PROGRESS_S: Final = 0.5
#: Posts between two rounds of asking after those that move: asking costs time for each of them.
POSTS_PER_TURN: Final = 8
#: A sleep is this share of the time in which nothing has happened, within two bounds. NIXL over TCP gets on
#: only while it is asked: with 2 % it moved some 3 % less than with this, at the same CPU time.
SLEEP_SHARE: Final = 0.005
#: Shorter ones take the core from the engine's own threads: Mooncake moved a sixth less with 20 µs.
MIN_SLEEP_S: Final = 100e-6
MAX_SLEEP_S: Final = 0.05
#: Longest text in a report; see ``coordinator.messages.Text``.
_MAX_TEXT: Final = 4096

#: The kinds of ``MoveFailed``.
CONNECT: Final = "connect"
DISCONNECTED: Final = "disconnected"
TRANSPORT: Final = "transport"
REVOKED: Final = "revoked"

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
        self._most_moving = backend.capabilities.max_outstanding_per_peer
        self._ours = ours
        self._budget = budget
        self._report = report
        self._crashed = crashed
        self._jobs = JobQueue(peer)
        # What follows belongs to the lane's thread alone.
        self._link: Link | None = None
        self._links = 0
        self._route: Route | None = None
        self._connected_to: ConnectPeer | None = None
        self._down = (CONNECT, f"{peer} was not connected yet")
        # Why the link must be dropped at the end of this turn; empty while it is sound.
        self._broken = ""
        self._unfenced: list[Link] = []
        self._fenced = False
        self._told_unfenced = ""
        self._moving: list[_Post] = []
        self._in_flight_bytes = 0
        self._stirred_s = 0.0
        self._got_on = False
        self._progress_due_s = 0.0
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
        try:
            while not (self._fenced and self._jobs.close_if_empty()):
                for note in self._jobs.notes(self._sleep_s()):
                    self._obey(note)
                self._post()
                self._sweep()
                if self._broken:
                    self._drop_link()
                if self._got_on:
                    self._tell_progress()
        except Exception:  # noqa: BLE001 - a thread must not die unseen; its host decides what follows
            self._crashed()

    def _sleep_s(self) -> float | None:
        """How long to sleep unless a note comes; None: for ever."""
        if self._jobs.has_ready and self._has_room():
            return 0.0
        if not self._moving:
            return None
        quiet_s = time.monotonic() - self._stirred_s
        rest_s = min(post.transfer.rest_s for post in self._moving)
        return min(max(quiet_s * SLEEP_SHARE, rest_s, MIN_SLEEP_S), MAX_SLEEP_S)

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
                        self._fail(job, REVOKED, "revoked")

    # --- links --------------------------------------------------------------------------------

    def _connect(self, command: ConnectPeer) -> None:
        self._fenced = False
        if self._link is not None:
            if command == self._connected_to:
                self._links += 1
                self._report(Connected(self.peer, 0.0))
                return
            self._broken = f"{self.peer} was connected anew, elsewhere"
            self._drop_link()
        self._links += 1
        theirs = RankPool(command.layout, command.world_size, command.rank, command.pages, command.regions)
        started_s = time.monotonic()
        try:
            self._route = route(self._ours, theirs)
            self._link = self._backend.connect(self.peer, command.endpoint)
        except (LayoutError, PoolError, BackendError) as error:
            message = f"{self.peer} could not be connected: {error}"[:_MAX_TEXT]
            self._down = (CONNECT, message)
            _log.warning("%s", message)
            self._report(ConnectFailed(self.peer, message))
        else:
            self._connected_to = command
            self._report(Connected(self.peer, time.monotonic() - started_s))

    def _drop_link(self) -> None:
        """The peer is gone: fail everything, and make quiet what still moves."""
        link, self._link = self._link, None
        self._down = (DISCONNECTED, self._broken)
        _log.warning("the link to %s is down: %s", self.peer, self._broken)
        self._fail_all()
        self._tell_unfenced(self._destroy([link] if link else []))

    def _fence(self) -> None:
        """Destroy every link. The lane ends then, unless there is more to do."""
        link, self._link = self._link, None
        self._down = (DISCONNECTED, f"the link to {self.peer} was fenced")
        self._fail_all()
        links, self._unfenced = self._unfenced, []
        problem = self._destroy([*links, link] if link else links)
        if not problem and self._moving:
            problem = f"{len(self._moving)} transfers did not settle"
        self._fenced = not problem
        self._tell_unfenced(problem)
        self._report(Fenced(self.peer, problem[:_MAX_TEXT]))

    def _destroy(self, links: Iterable[Link]) -> str:
        """Fence links and account for what has settled by that; what went wrong, or nothing."""
        problems = []
        for link in links:
            try:
                link.fence()
            except BackendError as error:
                self._unfenced.append(link)
                problems.append(str(error))
        self._sweep()
        self._broken = ""
        return "; ".join(problems)

    def _tell_unfenced(self, problem: str) -> None:
        """Say why links cannot be fenced, once for each text in a row: it is tried again and again."""
        if problem and problem != self._told_unfenced:
            _log.error("the link to %s cannot be fenced: %s", self.peer, problem)
        self._told_unfenced = problem

    # --- moves --------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether another post may be made, or what waits must fail for want of a link."""
        return self._link is None or (
            len(self._moving) < self._most_moving and self._in_flight_bytes < self._budget.in_flight_bytes
        )

    def _post(self) -> None:
        """Make a few posts, of the jobs in turn."""
        for _ in range(POSTS_PER_TURN):
            job = self._jobs.next(self._links) if self._has_room() else None
            if job is None:
                return
            self._post_one(job)
            if self._broken or self._jobs.has_notes:
                return

    def _post_one(self, job: Job) -> None:
        """Make the next post of a job, or fail it."""
        if self._link is None or self._route is None:
            self._fail(job, *self._down)
            return
        try:
            if job.posts is None:
                job.started_s = time.monotonic()
                move = job.move
                job.posts = self._route.posts(move.source_pages, move.destination_pages, self._budget)
                job.next_post = next(job.posts, None)
            if job.next_post is None:
                # A move of no pages.
                self._done(job)
                return
            size_bytes = sum(part.size_bytes for part in job.next_post)
            transfer = self._link.write(job.next_post)
        except PeerDisconnectedError as error:
            self._broken = str(error)
            return
        except (PoolError, BackendError) as error:
            self._fail(job, TRANSPORT, str(error))
            return
        job.moving += 1
        job.posted_bytes += size_bytes
        self._in_flight_bytes += size_bytes
        self._stirred_s = time.monotonic()
        job.next_post = next(job.posts, None)
        if job.next_post is not None:
            self._jobs.again(job)
        post = _Post(job, transfer, size_bytes)
        # Small posts, and all posts of an engine that copies by itself, are mostly done by now.
        if not self._over(post):
            self._moving.append(post)

    def _sweep(self) -> None:
        """Ask once after everything that moves."""
        if self._moving:
            self._moving = [post for post in self._moving if not self._over(post)]

    def _over(self, post: _Post) -> bool:
        """Ask after a post and act on what has become of it; whether it has settled."""
        transfer, job = post.transfer, post.job
        status = transfer.poll()
        settled = transfer.settled
        if transfer.progress != post.progress:
            post.progress = transfer.progress
            self._stirred_s = time.monotonic()
            self._got_on = job.got_on = True
        if settled or status is Status.FAILED:
            # A failure may take long to settle; its share of the budget is free for others.
            self._in_flight_bytes -= post.size_bytes
            post.size_bytes = 0
        if settled:
            self._stirred_s = time.monotonic()
            job.moving -= 1
        if job.failed:
            if not job.moving:
                self._jobs.forget(job)
                self._report(MoveSettled(job.move.move))
        elif status is Status.FAILED:
            lost = isinstance(transfer.error, PeerDisconnectedError)
            self._fail(job, DISCONNECTED if lost else TRANSPORT, str(transfer.error))
            if lost:
                self._broken = str(transfer.error)
        elif settled:
            self._got_on = job.got_on = True
            if job.next_post is None and not job.moving:
                self._done(job)
        return settled

    def _done(self, job: Job) -> None:
        self._jobs.forget(job)
        seconds = time.monotonic() - job.started_s
        self._report(MoveDone(job.move.move, job.posted_bytes, seconds))

    def _fail(self, job: Job, kind: str, message: str) -> None:
        """Report a failure. What is posted already is polled to its end."""
        job.failed = True
        job.next_post = None
        settled = not job.moving
        if settled:
            self._jobs.forget(job)
        started = job.posted_bytes > 0
        self._report(MoveFailed(job.move.move, kind, message[:_MAX_TEXT], settled=settled, started=started))

    def _fail_all(self) -> None:
        for job in self._jobs.take_all(self._links):
            self._fail(job, *self._down)

    def _tell_progress(self) -> None:
        """Name the moves that got on, and those that wait for their turn meanwhile."""
        now_s = time.monotonic()
        if now_s < self._progress_due_s:
            return
        self._progress_due_s = now_s + PROGRESS_S
        self._got_on = False
        jobs = self._jobs.unfailed()
        moves = [job.move.move for job in jobs if job.got_on or not job.moving]
        for job in jobs:
            job.got_on = False
        if moves:
            self._report(Progress(moves))


class _Post:
    """One transfer of a job, until it is settled; ``size_bytes`` is its share of the budget.

    ``progress`` is what the transfer had made when it was last asked.
    """

    __slots__ = ("job", "progress", "size_bytes", "transfer")

    def __init__(self, job: Job, transfer: Transfer, size_bytes: int) -> None:
        """Remember whose transfer it is."""
        self.job = job
        self.transfer = transfer
        self.progress = 0
        self.size_bytes = size_bytes
