"""A flag that a thread, or an engine's poller, can sleep on: an eventfd."""

from __future__ import annotations

import os
import threading

from coordinator.errors import NotReadyError


class Doorbell:
    """Rung by any thread, silenced by the one that it wakes. Neither call ever blocks."""

    __slots__ = ("_descriptor", "_lock", "_rings")

    def __init__(self) -> None:
        """Open it.

        Raises:
            NotReadyError: there is no descriptor to be had.

        """
        # So that a late ring never goes to a descriptor that is something else by now.
        self._lock = threading.Lock()
        self._rings = False
        self._descriptor = -1
        try:
            self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            message = f"a client cannot be woken: {error.strerror}; raise the limits of this process"
            raise NotReadyError(message) from error

    def fileno(self) -> int:
        """Return the descriptor, readable while the bell rings; -1 once it is closed."""
        return self._descriptor

    def ring(self) -> None:
        """Wake the sleeper. A system call only when it does not ring already."""
        with self._lock:
            if not self._rings and self._descriptor >= 0:
                self._rings = True
                os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        """Let the next sleep last. A system call only when it rings."""
        with self._lock:
            if self._rings and self._descriptor >= 0:
                self._rings = False
                os.eventfd_read(self._descriptor)

    def renewed(self) -> Doorbell:
        """In a forked child: return a bell of its own, for the descriptor is one with that of the parent."""
        # One of the parent's threads may have held it.
        self._lock = threading.Lock()
        if self._descriptor < 0:
            return self
        self.close()
        return Doorbell()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Calling it twice is fine."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
