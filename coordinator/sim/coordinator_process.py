"""A handle on a coordinator: a process of its own, with a configuration file of its own."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from coordinator.sim.child import Child, start
from coordinator.sim.errors import SimulationError
from coordinator.sim.toml import to_toml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ENDING_S: Final = 10.0


class CoordinatorProcess:
    """``kv-coordinator serve``, always at the same address, however often it is started.

    Attributes:
        control: its address for ranks.
        config_path: its configuration.
        log_path: its log, one JSON object a line.
        errors_path: what it and its workers write to stderr; native libraries are noisy.

    """

    def __init__(
        self, directory: Path, tables: Mapping[str, Mapping[str, object]], environment: Mapping[str, str]
    ) -> None:
        """Write the configuration: ``tables``, and sockets in ``directory``."""
        self.control = f"ipc://{directory}/control"
        self.config_path = directory / "coordinator.toml"
        self.log_path = directory / "coordinator.log"
        self.errors_path = directory / "coordinator.err"
        self._environment = environment
        self._child: Child | None = None
        sockets: dict[str, Mapping[str, object]] = {
            "listen": {"control": [self.control], "outcomes": [f"ipc://{directory}/outcomes"]},
            # Several coordinators may run on one host; who wants to look at this one chooses a port.
            "http": {"address": ""},
            "log": {"format": "json"},
        }
        self.config_path.write_text(to_toml({**sockets, **tables}))

    def start(self) -> None:
        """Start it; ranks wait for it by themselves.

        Raises:
            SimulationError: it runs already, or cannot be started.

        """
        if self._child is not None and self._child.alive:
            message = f"the coordinator (pid {self._child.pid}) runs already"
            raise SimulationError(message)
        command = (sys.executable, "-m", "coordinator.sim.leash", str(os.getpid()))
        arguments = ("serve", "--config", str(self.config_path))
        process = start((*command, *arguments), self._environment, self.errors_path, self.log_path)
        self._child = Child("coordinator", process, self.log_path, self.errors_path)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._running.kill()
        self._running.join(_ENDING_S)

    def stop(self) -> None:
        """SIGSTOP: it stands still, its sockets stay open."""
        self._running.stop()

    def cont(self) -> None:
        """SIGCONT."""
        self._running.cont()

    def check(self) -> None:
        """Raise SimulationError when it has ended without being asked to."""
        if self._child is not None:
            self._child.check()

    def tail(self) -> str:
        """Return the last lines of its log."""
        return self._running.tail()

    def end(self) -> None:
        """End it in good order (SIGTERM), by force if it takes too long."""
        if self._child is not None:
            self._child.terminate()
            self._child.join(_ENDING_S)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running.pid

    @property
    def _running(self) -> Child:
        if self._child is None:
            message = "the coordinator was not started"
            raise SimulationError(message)
        return self._child
