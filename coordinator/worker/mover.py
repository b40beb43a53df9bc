"""The moves of a lane over its link: posted, asked after, and reported on.

All of it belongs to the lane's thread (``coordinator.worker.lane``), which opens the links and drops them.
Moves take turns, post by post, so that a huge one does not hold up a short one. A budget bounds what the
engine has at a time, because it serves what it has in its own order.

Between two turns in which nothing is to be posted, the thread sleeps for a small share of the time
in which nothing has happened, not even a part of a post arrived: polling adds at most that share to
any wait, and costs little while nothing moves.

What is reported when
    A move ends with one ``MoveDone`` or ``MoveFailed``. One that failed is quiet once each of its
    posts is settled: ``MoveFailed.settled`` says so at once, or ``MoveSettled`` follows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from backends.base import BackendError, PeerDisconnectedError, Status
from coordinator.errors import PoolError
from coordinator.messages import MoveDone, MoveFailed, MoveSettled, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Link, Transfer
    from coordinator.messages import Report
    from coordinator.worker.jobs import Job, JobQueue
    from coordinator.worker.plan import Route
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
MAX_TEXT: Final = 4096

#: The kinds of ``MoveFailed``.
CONNECT: Final = "connect"
DISCONNECTED: Final = "disconnected"
TRANSPORT: Final = "transport"
REVOKED: Final = "revoked"


class Mover:
    """Moves what is queued over the link that the lane has.

    Attributes:
        link: what posts are made over; while there is none, moves fail as ``down`` says.
        route: plans the posts over it.
        links: how many links the lane was told to open; moves for a later one wait.
        down: the kind and the text with which moves fail.
        broken: why the link must be dropped at the end of this turn; empty while it is sound.
        got_on: a post, or a part of one, was done since progress was last told.

    """

    def __init__(
        self,
        peer: str,
        jobs: JobQueue,
        most_moving: int,
        budget: Budget,
        report: Callable[[Report], None],
    ) -> None:
        """Move ``jobs`` to ``peer``.

        Args:
            peer: for the texts of failures.
            jobs: what is to be moved.
            most_moving: how many posts may be under way at once.
            budget: how much the backend gets at once.
            report: hears what becomes of each move.

        """
        self.link: Link | None = None
        self.route: Route | None = None
        self.links = 0
        self.down = (CONNECT, f"{peer} was not connected yet")
        self.broken = ""
        self._jobs = jobs
        self._most_moving = most_moving
        self._budget = budget
        self._report = report
        self._moving: list[_Post] = []
        self._in_flight_bytes = 0
        self._stirred_s = 0.0
        self.got_on = False
        self._progress_due_s = 0.0

    @property
    def unsettled(self) -> int:
        """How many posts have not settled."""
        return len(self._moving)

    def sleep_s(self) -> float | None:
        """How long to sleep unless a note comes; None: for ever."""
        if self._jobs.has_ready and self._has_room():
            return 0.0
        if not self._moving:
            return None
        quiet_s = time.monotonic() - self._stirred_s
        rest_s = min(post.transfer.rest_s for post in self._moving)
        return min(max(quiet_s * SLEEP_SHARE, rest_s, MIN_SLEEP_S), MAX_SLEEP_S)

    def _has_room(self) -> bool:
        """Whether another post may be made, or what waits must fail for want of a link."""
        return self.link is None or (
            len(self._moving) < self._most_moving and self._in_flight_bytes < self._budget.in_flight_bytes
        )

    def post(self) -> None:
        """Make a few posts, of the jobs in turn."""
        for _ in range(POSTS_PER_TURN):
            job = self._jobs.next(self.links) if self._has_room() else None
            if job is None:
                return
            self._post_one(job)
            if self.broken or self._jobs.has_notes:
                return

    def _post_one(self, job: Job) -> None:
        """Make the next post of a job, or fail it."""
        if self.link is None or self.route is None:
            self.fail(job, *self.down)
            return
        try:
            if job.posts is None:
                job.started_s = time.monotonic()
                move = job.move
                job.posts = self.route.posts(move.source_pages, move.destination_pages, self._budget)
                job.next_post = next(job.posts, None)
            if job.next_post is None:
                # A move of no pages.
                self._done(job)
                return
            size_bytes = sum(part.size_bytes for part in job.next_post)
            transfer = self.link.write(job.next_post)
        except PeerDisconnectedError as error:
            self.broken = str(error)
            return
        except (PoolError, BackendError) as error:
            self.fail(job, TRANSPORT, str(error))
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

    def sweep(self) -> None:
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
            self.got_on = job.got_on = True
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
            self.fail(job, DISCONNECTED if lost else TRANSPORT, str(transfer.error))
            if lost:
                self.broken = str(transfer.error)
        elif settled:
            self.got_on = job.got_on = True
            if job.next_post is None and not job.moving:
                self._done(job)
        return settled

    def _done(self, job: Job) -> None:
        self._jobs.forget(job)
        seconds = time.monotonic() - job.started_s
        self._report(MoveDone(job.move.move, job.posted_bytes, seconds))

    def fail(self, job: Job, kind: str, message: str) -> None:
        """Report a failure. What is posted already is polled to its end."""
        job.failed = True
        job.next_post = None
        settled = not job.moving
        if settled:
            self._jobs.forget(job)
        started = job.posted_bytes > 0
        self._report(MoveFailed(job.move.move, kind, message[:MAX_TEXT], settled=settled, started=started))

    def lose_link(self, why: str) -> Link | None:
        """Have no link any more, and fail all moves; returns the link, which may still move."""
        link, self.link = self.link, None
        self.down = (DISCONNECTED, why)
        for job in self._jobs.take_all(self.links):
            self.fail(job, *self.down)
        return link

    def tell_progress(self) -> None:
        """Name the moves that got on, and those that wait for their turn meanwhile."""
        now_s = time.monotonic()
        if now_s < self._progress_due_s:
            return
        self._progress_due_s = now_s + PROGRESS_S
        self.got_on = False
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
