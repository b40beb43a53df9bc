"""The coordinator itself, as a process, for ranks of a test; with short bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Program, Programs

_CONFIG: Final = """
[listen]
control = ["ipc://{directory}/control"]
outcomes = ["ipc://{directory}/outcomes"]
[http]
address = ""
[backend]
name = "{backend}"
hosting = "{hosting}"
[backend.options.loopback]
control = "{directory}/faults.toml"
[rank]
heartbeat_s = 0.2
lost_after_s = {lost_after_s}
reattach_s = 0.8
[release]
settle_s = 0.5
drain_s = 0.5
"""
#: Every write hangs after 256 bytes.
_STALL: Final = '[[faults]]\nkind = "stall"\nafter_bytes = 256\n'


class Coordinator:
    """``kv-coordinator serve``, which can be killed and started again.

    Attributes:
        address: its control address.
        program: the one that runs, or ran last.

    """

    def __init__(
        self,
        programs: Programs,
        directory: Path,
        backend: str = "loopback",
        hosting: str = "coordinator",
        lost_after_s: float = 2.5,
    ) -> None:
        """Start it."""
        self.address = f"ipc://{directory}/control"
        self._programs = programs
        self._directory = directory
        self._config = directory / "config.toml"
        self._config.write_text(
            _CONFIG.format(directory=directory, backend=backend, hosting=hosting, lost_after_s=lost_after_s)
        )
        self.flow()
        self.program = self.serve()

    def serve(self) -> Program:
        """Start it (again)."""
        # One that is killed leaves its own socket files behind: let them be ours to remove.
        self.program = self._programs.python(
            *("-m", "coordinator", "serve", "--config", str(self._config)),
            environment={"TMPDIR": str(self._directory)},
        )
        self.program.says("coordinator.ready", 30)
        return self.program

    def kill(self) -> None:
        """SIGKILL."""
        self.program.process.kill()
        self.program.wait()

    def stall(self) -> None:
        """From now on every write of loopback hangs in the middle of a page."""
        self._faults.write_text(_STALL)

    def flow(self) -> None:
        """Let them go on."""
        self._faults.write_text("")

    @property
    def _faults(self) -> Path:
        return self._directory / "faults.toml"
