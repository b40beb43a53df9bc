"""Programs that a test starts: their output is kept, and none outlives the test."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_END_S: Final = 5.0


class Program:
    """A running program.

    Attributes:
        process: its handle; ``process.pid`` is what to send signals to.
        log: the file that stdout and stderr go to.

    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start it, without a terminal and without stdin."""
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
            )

    def output(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace")

    def says(self, text: str, timeout_s: float = 10.0) -> None:
        """Wait until it has printed ``text``; fails at once when it ends without."""

        def seen() -> bool:
            found = text in self.output()
            if not found and self.process.poll() is not None:
                message = f"ended with {self.process.returncode} and never said {text!r}:\n{self.output()}"
                raise AssertionError(message)
            return found

        eventually(seen, timeout_s, f"{text!r} in the output:\n{self.output()}")

    def wait(self, timeout_s: float = 10.0) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """End it now: politely, then by force."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(_END_S)


class Programs:
    """Starts programs for one test; the ``programs`` fixture ends them all."""

    def __init__(self, directory: Path) -> None:
        """Keep their output in ``directory``."""
        self._directory = directory
        self._started: list[Program] = []

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start a program of any kind."""
        log = self._directory / f"program-{len(self._started)}.log"
        program = Program(command, log, environment or {})
        self._started.append(program)
        return program

    def python(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start this Python with arguments, such as ``"-m", "coordinator", "serve"``."""
        return self.start(sys.executable, *arguments, environment=environment)

    def end(self) -> None:
        """End all that still run."""
        for program in self._started:
            program.end()
