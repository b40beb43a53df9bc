"""A child process: watched, stopped, ended within bounds, with its last words at hand."""

from __future__ import annotations

import signal
import subprocess
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from coordinator.sim.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 12
#: How long a process may take to go away after SIGKILL.
_KILL_S: Final = 10.0
_POLL_S: Final = 0.001


class Process(Protocol):
    """What is needed of a process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status; raises ``subprocess.TimeoutExpired``."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it still runs."""


class _Ending(Enum):
    """Which end of a child is no error."""

    NONE = "none"
    CLEAN = "clean"
    ANY = "any"


class Child:
    """One process and its output."""

    def __init__(self, name: str, process: Process, *logs: Path) -> None:
        """Watch over ``process``, whose output goes to ``logs``."""
        self.name = name
        self._process = process
        self._logs = logs
        self._accepts = _Ending.NONE

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs (or is stopped by a signal)."""
        return self._process.poll() is None

    def check(self) -> None:
        """Say so when it has ended as nobody asked it to.

        Raises:
            SimulationError: with how it ended and its last lines of output.

        """
        code = self._process.poll()
        if code is None or self._accepts is _Ending.ANY:
            return
        if code or self._accepts is _Ending.NONE:
            message = f"{self.name} (pid {self.pid}) {_ending(code)}; its last lines:\n{self.tail()}"
            raise SimulationError(message)

    def tail(self) -> str:
        """Return the last lines of its output."""
        lines = [line for log in self._logs for line in _last_lines(log)]
        return "\n".join(f"    {line}" for line in lines) or "    (no output)"

    def stop(self) -> None:
        """SIGSTOP: it stands still when this returns, until ``cont``.

        Raises:
            SimulationError: it does not stop.

        """
        self._process.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + _KILL_S
        while self.alive and not _is_stopped(self.pid):
            if time.monotonic() > deadline_s:
                message = f"{self.name} (pid {self.pid}) does not stop"
                raise SimulationError(message)
            time.sleep(_POLL_S)

    def cont(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def expect_end(self) -> None:
        """From now on it may end by itself, with exit status 0."""
        self._accepts = _Ending.CLEAN

    def kill(self) -> None:
        """SIGKILL, at once; ``join`` waits for the end."""
        self._accepts = _Ending.ANY
        self._process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, at once; ``join`` waits for the end."""
        self._accepts = _Ending.ANY
        self._process.send_signal(signal.SIGTERM)

    def join(self, timeout_s: float) -> int:
        """Wait for its end, with SIGKILL after ``timeout_s``; the exit status, negative for a signal.

        Raises:
            SimulationError: it outlives SIGKILL.

        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        try:
            return self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            message = f"{self.name} (pid {self.pid}) does not end, not even after SIGKILL"
            raise SimulationError(message) from None


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    errors: Path,
    output: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        command: the program and its arguments.
        environment: all of its environment.
        errors: the file to which stderr is appended.
        output: the file to which stdout is appended; None: stdin and stdout are pipes.

    Raises:
        SimulationError: it cannot be started.

    """
    with errors.open("ab") as stderr, (output or errors).open("ab") as stdout:
        try:
            return subprocess.Popen(  # noqa: S603 - the command is ours, there is no shell
                command,
                stdin=subprocess.PIPE if output is None else subprocess.DEVNULL,
                stdout=subprocess.PIPE if output is None else stdout,
                stderr=stderr,
                env=dict(environment),
                # Ctrl-C is for the driver: it ends its children in good order.
                process_group=0,
            )
        except OSError as error:
            message = f"{command[0]} cannot be started: {error}"
            raise SimulationError(message) from error


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [f"(no output: {error})"]
    return [line for line in lines if line.strip()][-_TAIL_LINES:]


def _is_stopped(pid: int) -> bool:
    """Whether the kernel says ``T`` of it; the name before that, in parentheses, may be anything."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] == "T"


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
