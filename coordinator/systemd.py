"""Tells systemd how the coordinator is: ready, alive, about to end (``Type=notify``, ``WatchdogSec=``).

Without systemd (no ``NOTIFY_SOCKET``) nothing is done.
"""

from __future__ import annotations

import os
import socket
import time

from coordinator.logs import get_logger

_log = get_logger()


class Notifier:
    """Sends states to the service manager that started us."""

    def __init__(self) -> None:
        """Find the service manager in the environment; what is there is taken out of it, for our workers."""
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        # Twice in the time that is given, as its manual asks.
        self._period_s = int(period_us) / 2e6 if period_us.isdecimal() and ours else 0.0
        self._due_s = 0.0

    def ready(self) -> None:
        """Ranks can connect."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """The event loop turns; said as often as the watchdog wants to hear it."""
        now_s = time.monotonic()
        if self._period_s and now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # An address that begins with @ is in the abstract namespace.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)  # noqa: FBT003 - that is its name
                sender.sendto(state.encode(), address)
        except OSError as error:
            _log.warning("systemd.unreachable", state=state, error=str(error))
