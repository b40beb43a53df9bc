"""A backend worked by hand: its transfers end when, and as, the test says.

It checks on the way what every backend may expect of a lane: one thread per link, no more than what
was declared outstanding, nothing written on a link that is broken.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, ClassVar

from backends.base import (
    Backend,
    BackendError,
    Capabilities,
    ConnectError,
    Link,
    PeerDisconnectedError,
    Status,
    Transfer,
)
from tests.worker.support import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import Part, Region

MOST_MOVING = 3


class HandTransfer(Transfer):
    """Moves until ``end`` is called; counts how often it was asked.

    While it ``gets_on``, a part has arrived each time that it is asked. ``wants_s`` is its ``rest_s``.
    """

    __slots__ = ("_verdict", "gets_on", "polls", "size_bytes", "wants_s")

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.polls = 0
        self.gets_on = False
        self.wants_s = 0.0
        self._verdict: tuple[BackendError | None, bool] | None = None

    @property
    def rest_s(self) -> float:
        """What the test wants."""
        return self.wants_s

    def poll(self) -> Status:
        """Take the test's verdict, when there is one."""
        self.polls += 1
        self.progress += self.gets_on
        if self._verdict is not None:
            self.error, self.settled = self._verdict
            self.status = Status.FAILED if self.error else Status.DONE
        return self.status

    def end(self, error: BackendError | None = None, *, settled: bool = True) -> None:
        """Let it be done, or fail; what is not settled is settled by a second call."""
        self._verdict = (error, settled)

    def wait_until_settled(self) -> None:
        """Wait until the lane has seen that it has settled."""
        assert eventually(lambda: self.settled)


class HandLink(Link):
    """Keeps every write for the test."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.writes: list[HandTransfer] = []
        self.fence_errors: list[str] = []
        self.write_error: Exception | None = None
        self.on_write: Callable[[], None] | None = None
        self.fenced = False
        self._thread = threading.get_ident()
        self._came = threading.Condition()

    def write(self, parts: Sequence[Part]) -> Transfer:
        """Post; see the module for what is checked."""
        self._check()
        if self.write_error is not None:
            raise self.write_error
        transfer = HandTransfer(sum(part.size_bytes for part in parts))
        with self._came:
            self.writes.append(transfer)
            self._came.notify_all()
        if self.on_write is not None:
            self.on_write()
        moving = [other for other in self.writes if not other.settled]
        assert len(moving) <= MOST_MOVING
        return transfer

    def fence(self) -> None:
        """Settle everything, unless it is to go wrong."""
        assert threading.get_ident() == self._thread
        if self.fence_errors:
            raise BackendError(self.fence_errors.pop(0))
        self.fenced = True
        for transfer in self.writes:
            if not transfer.settled:
                transfer.end(transfer.error or PeerDisconnectedError("fenced"))
                transfer.poll()

    def wait_for_writes(self, count: int) -> list[HandTransfer]:
        """Wait until there have been ``count`` writes; return all of them."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._came:
            while len(self.writes) < count:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"{count} writes did not come, only {len(self.writes)}"
                self._came.wait(left_s)
            return list(self.writes)

    def _check(self) -> None:
        assert threading.get_ident() == self._thread
        assert not self.fenced
        assert not any(isinstance(other.error, PeerDisconnectedError) for other in self.writes)


class HandBackend(Backend):
    """Connects to every endpoint but ``b"refuse"``, once ``may_connect`` is set."""

    name: ClassVar[str] = "hand"
    capabilities: ClassVar[Capabilities] = Capabilities(
        cancellable=False,
        max_outstanding_per_peer=MOST_MOVING,
        min_efficient_bytes=1,
        lands_after_settled=False,
    )

    def __init__(self) -> None:
        super().__init__("hand", {})
        self.links: list[HandLink] = []
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.closed = False

    def start(self, *, sends: bool) -> None:
        """Nothing to start."""
        assert sends

    def register(self, region: Region) -> int:
        """Accept all memory."""
        assert region.size_bytes
        return 0

    def endpoint(self) -> bytes:
        """Return something."""
        return b"hand"

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """Block until it is allowed."""
        assert self.may_connect.wait(PATIENCE_S)
        if endpoint == b"refuse":
            message = f"{peer} refuses"
            raise ConnectError(message)
        link = HandLink(peer)
        self.links.append(link)
        return link

    def links_came(self, count: int) -> list[HandLink]:
        """Wait for this many connects; return their links."""
        assert eventually(lambda: len(self.links) >= count)
        return list(self.links)

    def close(self) -> None:
        """Remember it."""
        self.closed = True
