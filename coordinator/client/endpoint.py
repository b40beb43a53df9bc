"""A decode rank's receiving side: its memory, registered once, for all coordinators."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Self

from backends import registry
from backends.base import Region
from coordinator.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.client.pool import KVPool


class Endpoint:
    """What prefill nodes write into. One per process; it is a context manager.

    Attributes:
        pool: the registered memory. Close the endpoint before the pool.
        name: the backend.
        address: what a prefill node's worker needs to reach it.

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
        if pool.tensor.device.type != "cpu":
            message = f"memory on {pool.tensor.device} cannot be registered by this version"
            raise PoolError(message)
        self.pool = pool
        self.name = backend
        agent = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._backend = registry.load(backend)(agent, options or {})
        try:
            self._backend.start(sends=False)
            self._backend.register(
                Region(address=pool.address, size_bytes=pool.size_bytes, path=pool.path or None)
            )
            self.address = self._backend.endpoint()
        except BaseException:
            # Whatever went wrong, an engine that has started must not keep our memory.
            self._backend.close()
            raise
        self._closed = False

    def close(self) -> None:
        """Stop receiving and give the memory back. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
