"""The moves of one lane that are not over, as the host's thread and the lane's thread share them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from coordinator.messages import ConnectPeer, FencePeer, Revoke

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from backends.base import Part
    from coordinator.messages import Move

#: Moves that wait for one lane, at most.
MAX_JOBS: Final = 1 << 16

#: What a lane is told; None only wakes it.
Note = ConnectPeer | FencePeer | Revoke | None

_log = logging.getLogger(__name__)


class Job:
    """A move that is not over.

    Until it is ``taken`` any thread may fail it, under the lock; then it belongs to the lane's thread.

    Attributes:
        move: what was asked for.
        link: for which link of the lane it is: the first one is 1.
        taken: the lane's thread has begun with it.
        failed: it was reported as failed; what still moves of it is waited for.
        posts: what is left to plan; None before the first post was planned.
        next_post: planned, and to be posted next; None when nothing is left.
        moving: how many of its posts have not settled.
        posted_bytes: bytes in all its posts so far; 0 when nothing was posted.
        started_s: monotonic time at which the lane began with it.
        got_on: one of its posts, or a part of one, was done since progress was last told.

    """

    __slots__ = (
        "failed",
        "got_on",
        "link",
        "move",
        "moving",
        "next_post",
        "posted_bytes",
        "posts",
        "started_s",
        "taken",
    )

    def __init__(self, move: Move, link: int) -> None:
        """Nothing has happened yet."""
        self.move = move
        self.link = link
        self.taken = False
        self.failed = False
        self.posts: Iterator[list[Part]] | None = None
        self.next_post: list[Part] | None = None
        self.moving = 0
        self.posted_bytes = 0
        self.started_s = 0.0
        self.got_on = False


class JobQueue:
    """The jobs of a lane, those that want to post in turn, and the notes to its thread.

    Everything here is under one lock. The lane closes it when it ends; nothing goes in any more then.

    Notes and jobs are apart, so each job says for which link it is: a job that was queued behind a
    ``ConnectPeer`` neither goes out on the link before it, nor fails with that.
    """

    def __init__(self, peer: str) -> None:
        """Begin empty; ``peer`` is for the log."""
        self._peer = peer
        self._lock = threading.Lock()
        # The same lock: a note has come. Not a ``SimpleQueue``: its ``get`` with a time-out waits for ever
        # when that passes between its two looks at the clock (CPython 3.11).
        self._noted = threading.Condition(self._lock)
        self._jobs: dict[int, Job] = {}
        self._ready: deque[Job] = deque()
        # How many of those were revoked before they were taken.
        self._dropped = 0
        self._notes: deque[Note] = deque()
        self._links = 0
        self._closed = False

    # --- for the host's thread ----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing is accepted any more."""
        return self._closed

    def put(self, note: Note) -> bool:
        """Tell the lane something; false when it is closed."""
        with self._lock:
            if self._closed:
                return False
            if isinstance(note, ConnectPeer):
                self._links += 1
            self._note(note)
            return True

    def add(self, move: Move) -> str:
        """Queue a move; why it cannot be, or an empty text."""
        with self._lock:
            if self._closed:
                return f"the link to {self._peer} was fenced"
            if move.move in self._jobs:
                _log.error("move %d to %s is under way already; ignored", move.move, self._peer)
                return ""
            if len(self._jobs) >= MAX_JOBS:
                return f"{MAX_JOBS} moves to {self._peer} are waiting already"
            job = self._jobs[move.move] = Job(move, self._links)
            self._ready.append(job)
            # Any note wakes the lane, which looks for jobs once it has read all of them.
            if not self._notes:
                self._note(None)
        return ""

    def revoke(self, moves: Iterable[int]) -> list[int]:
        """Drop the moves that the lane has not taken, and return them; tell it of those that it has."""
        taken: list[int] = []
        dropped: list[int] = []
        with self._lock:
            for move in moves:
                job = self._jobs.get(move)
                if job is None:
                    continue
                if job.taken:
                    taken.append(move)
                else:
                    job.failed = True
                    del self._jobs[move]
                    dropped.append(move)
            self._dropped += len(dropped)
            self._purge()
            if taken:
                self._note(Revoke(taken))
        return dropped

    # --- for the lane's thread ----------------------------------------------------------------

    def notes(self, timeout_s: float | None) -> Iterator[Note]:
        """Yield what has come, after waiting so long for the first note, for ever when None."""
        with self._lock:
            if not self._notes:
                self._noted.wait(timeout_s)
        # Also those that come meanwhile. Nobody else takes any.
        while self._notes:
            yield self._notes.popleft()

    @property
    def has_notes(self) -> bool:
        """Whether the lane should listen."""
        return bool(self._notes)

    @property
    def has_ready(self) -> bool:
        """Whether a job may want to post."""
        return bool(self._ready)

    def next(self, link: int) -> Job | None:
        """Take the job whose turn it is, unless it is for a later link: there is a note first, then."""
        with self._lock:
            while self._ready and self._ready[0].link <= link:
                job = self._ready.popleft()
                if not job.failed:
                    job.taken = True
                    return job
                if not job.taken:
                    self._dropped -= 1
        return None

    def again(self, job: Job) -> None:
        """Put a job that has more to post behind the others."""
        with self._lock:
            self._ready.append(job)

    def get(self, move: int) -> Job | None:
        """Return a job that is not over."""
        return self._jobs.get(move)

    def forget(self, job: Job) -> None:
        """Drop a job that is over."""
        with self._lock:
            del self._jobs[job.move.move]

    def take_all(self, link: int) -> list[Job]:
        """Take all jobs up to this link that have not failed."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.link <= link and not job.failed]
            for job in jobs:
                job.taken = True
        return jobs

    def unfailed(self) -> list[Job]:
        """All jobs that have not failed."""
        with self._lock:
            return [job for job in self._jobs.values() if not job.failed]

    def close_if_empty(self) -> bool:
        """Close unless there is something to do; whether it is closed."""
        with self._lock:
            self._closed = not self._jobs and not self._notes
            return self._closed

    # --- with the lock held --------------------------------------------------------------------

    def _purge(self) -> None:
        """Let go of what was dropped, also while the lane's thread hangs in a call.

        Only when it is most of what there is: so it costs the same for each job, however many there are.
        """
        if 2 * self._dropped > len(self._ready):
            self._ready = deque(job for job in self._ready if not job.failed)
            self._dropped = 0

    def _note(self, note: Note) -> None:
        """Leave a note, and wake the lane's thread for it."""
        self._notes.append(note)
        self._noted.notify()
