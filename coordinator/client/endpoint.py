"""A decode rank's receiving side: its memory, registered once, for all coordinators."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from backends import registry
from coordinator.client.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from backends.base import Backend
    from coordinator.client.pool import KVPool

#: Length of the file for the gate of memory that has no file; it only carries locks.
GATE_BYTES: Final = 4096

logger = logging.getLogger(__name__)


class Endpoint:
    """What prefill nodes write into. One per process; it is a context manager.

    Calls may come from any thread.

    Attributes:
        pool: the registered memory. Close the endpoint before the pool.
        name: the backend.
        address: what a prefill node's worker needs to reach it.
        renewals: how often it was renewed.

    """

    def __init__(
        self, pool: KVPool, backend: str = "nixl", options: Mapping[str, object] | None = None
    ) -> None:
        """Start the backend and register the pool.

        Args:
            pool: the memory to write into.
            backend: its name; see ``backends.registry``.
            options: the backend's own settings.

        Raises:
            BackendError: there is no such backend, it cannot start, or refuses the memory.
            PoolError: the pool is closed.

        """
        pool.check_open()
        self.pool = pool
        self.name = backend
        self.renewals = 0
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._followers: list[weakref.WeakMethod[Callable[[bytes], None]]] = []
        self._former: list[Backend] = []
        self._closed = False
        self._backend: Backend | None = None
        # Memory that has no file gets one for its gate.
        self._gate = None if pool.path else Segment(GATE_BYTES)
        try:
            self._start()
        except BaseException:
            self._close_gate()
            raise

    def follow(self, moved: Callable[[bytes], None]) -> None:
        """Call ``moved``, a bound method, with the new address after each renewal, from any thread.

        It is called as long as its object lives, which is not kept alive by this.
        """
        with self._lock:
            self._followers = [*self._living(), weakref.WeakMethod(moved)]

    def renew(self, seen: int) -> None:
        """Destroy the agent that others reach, and start a new one, at a new address.

        Whatever any prefill node was writing fails there as ``transport``, also for coordinators that
        are well; all of them are told the new address. With NIXL it takes some 0.1 s, with Mooncake up
        to a second, in which other threads may stand still.

        Args:
            seen: what ``renewals`` was when the need arose; if it is more by now, all is done.

        Raises:
            BackendError: the former agent cannot be destroyed, or the new one cannot be started.
                Until another attempt succeeds nobody can write here.

        """
        with self._lock:
            if self._closed or self.renewals > seen:
                return
            began_s = time.monotonic()
            if self._backend is not None:
                self._backend.close()
                self._former.append(self._backend)
                self._backend = None
            self._start()
            self.renewals += 1
            followers = self._followers = self._living()
        logger.warning(
            "the %s endpoint was renewed in %.3f s: a coordinator was lost, whose workers may still write",
            self.name, time.monotonic() - began_s,
        )  # fmt: skip
        for follower in followers:
            moved = follower()
            if moved is not None:
                moved(self.address)

    def _living(self) -> list[weakref.WeakMethod[Callable[[bytes], None]]]:
        return [follower for follower in self._followers if follower() is not None]

    def is_quiet(self) -> bool:
        """Whether it is proven that nothing lands any more on account of former addresses."""
        with self._lock:
            self._former = [backend for backend in self._former if not backend.silent()]
            return not self._former

    def close(self) -> None:
        """Stop receiving and give the memory back. Calling it twice is fine.

        Raises:
            BackendError: the agent cannot be destroyed. Until another call succeeds the memory may still
                be written.

        """
        with self._lock:
            self._closed = True
            if self._backend is not None:
                self._backend.close()
                self._backend = None
            self._close_gate()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Start a backend under a new name; its address is ours then."""
        agent = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        backend = registry.load(self.name)(agent, self._options)
        try:
            backend.start(sends=False)
            for region in self.pool.regions:
                if self._gate is not None:
                    region = replace(region, gate_path=self._gate.path, gate_bytes=GATE_BYTES)  # noqa: PLW2901 - the same
                backend.register(region)
            self.address = backend.endpoint()
        except BaseException:
            # Whatever went wrong, an engine that has started must not keep our memory.
            backend.close()
            raise
        self._backend = backend
