"""How a rank proves that nothing moves at its pages any more, after its coordinator was lost.

A prefill rank's pages are read by its worker. One that the rank itself runs must have fenced all
links of its former lives (``coordinator.client.hosting``). One that the coordinator had spawned dies with
the coordinator, but one that is only cut off lives on, and its workers with it. Whoever sends from a pool
holds the lock on its file (``coordinator.worker.memory``), which the kernel drops with the process. So
the rank tries to take it. Having it, it knows that the former worker is dead, and keeps it so that none
can be started again for its former life; it lets go when a coordinator has welcomed the new one. That
coordinator may have spawned the next worker before: a holder that sends for the new life is proof, too.

A decode rank's pages are written by processes that may be anywhere. So it renews its endpoint: the
agent that others reach is destroyed, and a new one takes its place. The backend knows when nothing can
land any more on account of the former one.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from backends.base import InvalidTransferError
from backends.file_locks import holder, try_lock, unlock
from backends.memory import open_shared
from coordinator.worker.memory import LOCKS, lock_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.client.endpoint import Endpoint
    from coordinator.client.hosting import Hosting
    from coordinator.client.pool import KVPool

logger = logging.getLogger(__name__)


class Proof(ABC):
    """One rank's way to its proof. All but ``lost`` are for the I/O thread; some calls block."""

    @abstractmethod
    def lost(self) -> None:
        """A coordinator is lost: what was proven before does not count any more."""

    @abstractmethod
    def prepare(self) -> None:
        """Do what must be done before the next life introduces itself; may take a second.

        Raises:
            BackendError: it could not be done; try again later.

        """

    @abstractmethod
    def holds(self, instance: int) -> bool:
        """Whether all is quiet; ``instance`` is the rank's present life."""

    @abstractmethod
    def welcomed(self) -> None:
        """A coordinator knows the present life, and so it has done with the former ones."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""


class SourceProof(Proof):
    """For a prefill rank: no worker of a former life has its pool."""

    def __init__(self, pool: KVPool, hosting: Hosting) -> None:
        """Watch over ``pool``, and what this process itself does with it."""
        self._hosting = hosting
        self._path = pool.path
        self._size_bytes = pool.size_bytes
        self._descriptor = -1

    def lost(self) -> None:
        """Nothing to note: it is looked at afterwards."""

    def prepare(self) -> None:
        """Nothing to do: a former worker ends by itself, or is not ours to end."""

    def holds(self, instance: int) -> bool:
        """See ``Proof.holds``."""
        if not self._hosting.serves_only(instance):
            return False
        if not self._path:
            return True  # No other process can have it.
        if self._descriptor < 0:
            try:
                self._descriptor = open_shared(self._path, self._size_bytes)
            except InvalidTransferError as error:
                logger.warning("it cannot be seen who uses the pool: %s", error)
                return False
        wanted = lock_for(instance)
        return try_lock(self._descriptor, wanted) or holder(self._descriptor, wanted) == wanted

    def welcomed(self) -> None:
        """See ``Proof.welcomed``."""
        if self._descriptor >= 0:
            # Explicitly: a forked child would hold it as long as it has the descriptor.
            unlock(self._descriptor, LOCKS)
            self.close()

    def close(self) -> None:
        """See ``Proof.close``."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DestinationProof(Proof):
    """For a decode rank: its endpoint was renewed, and nothing lands on account of the former one."""

    def __init__(self, endpoint: Endpoint, moved: Callable[[bytes], None]) -> None:
        """Renew ``endpoint``; ``moved`` hears where it is then, whoever renewed it."""
        self._endpoint = endpoint
        self._seen = 0
        endpoint.follow(moved)

    def lost(self) -> None:
        """See ``Proof.lost``."""
        self._seen = self._endpoint.renewals

    def prepare(self) -> None:
        """See ``Proof.prepare``."""
        self._endpoint.renew(self._seen)

    def holds(self, instance: int) -> bool:
        """See ``Proof.holds``."""
        del instance
        return self._endpoint.is_quiet()

    def welcomed(self) -> None:
        """Nothing is held that anybody waits for."""

    def close(self) -> None:
        """The endpoint is closed by whoever made it."""
