"""The driver's end of the fork server: starts ranks there, and learns how they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.sim.child import Child, start
from coordinator.sim.errors import SimulationError
from coordinator.sim.settings import Ended, Fork, Forked

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from coordinator.sim.settings import RankSettings

#: Until the fork server answers; at first it loads what ranks need, on a host that may be busy.
_FORK_S: Final = 60.0
_ENDING_S: Final = 10.0
_READ_BYTES: Final = 1 << 16


class ForkServer:
    """Starts ranks by forking them off a process that has loaded what they need."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        """Start it, with its log in ``directory``; it gets ready while others start.

        Raises:
            SimulationError: it cannot be started.

        """
        self._pending = b""
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}
        log = directory / "forkserver.log"
        command = (sys.executable, "-m", "coordinator.sim.forkserver", str(os.getpid()))
        process = start(command, environment, errors=log)
        self._child = Child("the fork server", process, log)
        if process.stdin is None or process.stdout is None:
            message = "the fork server has no pipes"
            raise SimulationError(message)
        self._stdin, self._stdout = process.stdin, process.stdout

    def start(self, settings: RankSettings, environment: Mapping[str, str], log: Path) -> Child:
        """Start a rank with this environment, whose output goes to ``log``.

        Raises:
            SimulationError: the fork server has died, or does not answer.

        """
        line = msgspec.json.encode(Fork(str(log), dict(environment), settings)) + b"\n"
        try:
            self._stdin.write(line)
            self._stdin.flush()
        except BrokenPipeError as error:
            message = f"the fork server is gone; its last lines:\n{self._child.tail()}"
            raise SimulationError(message) from error
        deadline_s = time.monotonic() + _FORK_S
        while not self._forked:
            self._child.check()
            if time.monotonic() > deadline_s:
                message = f"the fork server has not started a rank within {_FORK_S:g} s"
                raise SimulationError(message)
            self._listen(0.1)
        return Child(f"{settings.group} rank {settings.rank}", ForkedProcess(self, self._forked.pop()), log)

    def code(self, pid: int, timeout_s: float) -> int | None:
        """Return how a rank has ended, waiting so long for it; None while it runs."""
        deadline_s = time.monotonic() + timeout_s
        while pid not in self._ended:
            if not self._child.alive:
                # Its ranks have died with it, and nobody will tell how.
                return -signal.SIGKILL
            left_s = deadline_s - time.monotonic()
            self._listen(max(0.0, left_s))
            if left_s <= 0:
                break
        return self._ended.get(pid)

    def close(self) -> None:
        """End it, and with it whatever rank still runs."""
        self._child.expect_end()
        self._stdin.close()
        self._child.join(_ENDING_S)
        self._stdout.close()

    def _listen(self, timeout_s: float) -> None:
        if not select.select([self._stdout], [], [], timeout_s)[0]:
            return
        read = os.read(self._stdout.fileno(), _READ_BYTES)
        *lines, self._pending = (self._pending + read).split(b"\n")
        for line in lines:
            match msgspec.json.decode(line, type=Forked | Ended):
                case Forked(pid=pid):
                    self._forked.append(pid)
                case Ended(pid=pid, code=code):
                    self._ended[pid] = code


class ForkedProcess:
    """A rank that the fork server has started, as ``child.Process`` wants it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        """Hold on to the process, so that a signal can never reach another one of that number."""
        self.pid = pid
        self._server = server
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._let_go(self._server.code(self.pid, 0.0))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status; raises ``subprocess.TimeoutExpired``."""
        limit_s = _ENDING_S if timeout is None else timeout
        code = self._let_go(self._server.code(self.pid, limit_s))
        if code is None:
            msg = f"rank {self.pid}"
            raise subprocess.TimeoutExpired(msg, limit_s)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None and self._descriptor >= 0:
            signal.pidfd_send_signal(self._descriptor, sig)

    def _let_go(self, code: int | None) -> int | None:
        if code is not None and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        return code
