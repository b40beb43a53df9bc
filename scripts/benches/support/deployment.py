"""Real processes for a bench: a coordinator and ranks, which run the bench's ``engine``.

    with Deployment(__name__, {"handoff": {"deadline_s": 60.0}}) as deployment:
        ranks = deployment.start(Role.PREFILL, "prefill", world_size=2, pages=64)
        deployment.wait_ready()
        ranks[0].tell(plan)
        answer = ranks[0].hear(timeout_s=10)

At its end nothing is left behind: no process, no socket file, no shared memory.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from coordinator.messages import Role
from coordinator.sim.child import Child, start
from coordinator.sim.coordinator_process import CoordinatorProcess
from coordinator.sim.errors import SimulationError
from scripts.benches.support.layout import tiny_layout
from scripts.benches.support.rank_process import READY_S, RankSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.layout import Layout

#: Settings of a coordinator, by table of its TOML file.
Tables = Mapping[str, Mapping[str, object]]

_ROOT: Final = Path(__file__).parents[3]
_CONNECT_S: Final = 60.0
_ENDING_S: Final = 5.0
_LOOK_S: Final = 0.05
#: Longest directory in which the path of a socket still fits; the kernel takes 107 bytes.
_MAX_DIRECTORY: Final = 50


class RankHandle:
    """A rank's process, as the driver sees it."""

    def __init__(
        self, settings: RankSettings, directory: Path, environment: Mapping[str, str], python: str
    ) -> None:
        """Start it with this interpreter.

        Raises:
            SimulationError: it cannot be started.

        """
        self.name = f"{settings.group}/{settings.rank}"
        log = directory / f"{settings.group}-{settings.rank}.log"
        arguments = (str(os.getpid()), msgspec.json.encode(settings).decode())
        command = (python, "-m", "scripts.benches.support.rank_process", *arguments)
        self.child = Child(self.name, start(command, environment, log, log), log)
        self._connection: Connection | None = None

    def attach(self, connection: Connection) -> None:
        """It has called back."""
        self._connection = connection

    def tell(self, message: object) -> None:
        """Send something to its ``engine``.

        Raises:
            SimulationError: it is gone.

        """
        try:
            self._attached.send(message)
        except OSError as error:
            raise self._gone() from error

    def hear(self, timeout_s: float) -> Any:  # noqa: ANN401 - each bench knows what its engine says
        """Wait for what its ``engine`` says next.

        Raises:
            SimulationError: it is gone, or says nothing in time.

        """
        if not self._attached.poll(timeout_s):
            message = (
                f"{self.name} has said nothing for {timeout_s:g} s; its last lines:\n{self.child.tail()}"
            )
            raise SimulationError(message)
        try:
            return self._attached.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def kill(self) -> None:
        """SIGKILL; ``end`` waits for the end."""
        self.child.kill()

    def hang_up(self) -> None:
        """Let it end: its ``engine`` hears that the driver wants nothing more."""
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        """See it to its end, by force after a while."""
        self.hang_up()
        self.child.expect_end()
        self.child.join(_ENDING_S if self._connection is not None else 0.0)

    @property
    def _attached(self) -> Connection:
        if self._connection is None:
            message = f"{self.name} has not called back yet"
            raise SimulationError(message)
        return self._connection

    def _gone(self) -> SimulationError:
        # What it dies of is written after it has hung up.
        self.child.join(_ENDING_S)
        return SimulationError(f"{self.name} is gone; its last lines:\n{self.child.tail()}")


class Deployment:
    """A coordinator and its ranks.

    Attributes:
        coordinator: a handle on the coordinator's process.
        directory: where sockets, configuration and logs lie.

    """

    def __init__(
        self,
        bench: str,
        tables: Tables,
        *,
        backend: str = "loopback",
        options: Mapping[str, object] | None = None,
        import_from: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        """Start the coordinator.

        Args:
            bench: the module whose ``engine`` the ranks run.
            tables: settings of the coordinator.
            backend: what moves the pages.
            options: the backend's own settings, on both sides.
            import_from: a directory that all processes find modules in, beside those of this one.
            python: the interpreter of the ranks; one of another environment brings its own modules.

        Raises:
            SimulationError: it cannot be started.

        """
        self._bench = bench
        self._backend = backend
        self._python = python
        self._options = dict(options or {})
        self._started: list[RankHandle] = []
        self._prefill_ranks = 0
        self._awaited: dict[tuple[str, int], RankHandle] = {}
        self._cleanup = ExitStack()
        try:
            self.directory = self._make_directory()
            self._environment = self._make_environment(import_from, sys.path)
            own = sys.path if python == sys.executable else [str(_ROOT)]
            self._rank_environment = self._make_environment(import_from, own)
            self._listener = self._cleanup.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(f"{self.directory}/driver")
            self._listener.listen(64)
            self._listener.settimeout(_CONNECT_S)
            defaults: dict[str, Mapping[str, object]] = {
                "backend": {"name": backend},
                "shutdown": {"grace_s": 0.0},
            }
            if options:
                defaults[f"backend.options.{backend}"] = options
            self.coordinator = CoordinatorProcess(self.directory, {**defaults, **tables}, self._environment)
            self._cleanup.callback(self.coordinator.end)
            self.coordinator.start()
            self._cleanup.callback(self._end_ranks)
        except BaseException:
            self._cleanup.close()
            raise

    def start(
        self, role: Role, group: str, world_size: int, *, pages: int, layout: Layout | None = None
    ) -> list[RankHandle]:
        """Start the ranks of a group; ``wait_ready`` waits for them.

        Raises:
            SimulationError: a process cannot be started.

        """
        ranks = []
        for number in range(world_size):
            settings = RankSettings(
                bench=self._bench,
                role=role,
                group=group,
                rank=number,
                world_size=world_size,
                control=self.coordinator.control,
                driver=f"{self.directory}/driver",
                backend=self._backend,
                options=self._options,
                layout=layout or tiny_layout(world_size),
                pages=pages,
            )
            rank = RankHandle(settings, self.directory, self._rank_environment, self._python)
            self._awaited[group, number] = rank
            self._started.append(rank)
            self._prefill_ranks += role is Role.PREFILL
            ranks.append(rank)
        return ranks

    def wait_ready(self, *, workers: bool = True) -> None:
        """Wait until all ranks that were started hear the coordinator, and all ``workers`` are up.

        Raises:
            SimulationError: one does not in time.

        """
        ranks = list(self._awaited.values())
        while self._awaited:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise self._not_ready() from None
            caller = Connection(connection.detach())
            self._awaited.pop(caller.recv()).attach(caller)
        for rank in ranks:
            rank.hear(READY_S)
        # A worker that is starting takes CPU time from what is measured.
        if workers:
            self.wait_for_log("worker.up", self._prefill_ranks)

    def check(self) -> None:
        """Raise SimulationError when the coordinator has ended."""
        self.coordinator.check()

    def close(self) -> None:
        """End everything, and remove every trace."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close; an exception takes the coordinator's last lines along, which go with everything else."""
        if error is not None:
            error.add_note(f"the coordinator's last lines:\n{self.coordinator.tail()}")
        self.close()

    def wait_for_log(self, event: str, times: int) -> None:
        """Wait until the coordinator has logged ``event`` so many times since its start.

        Raises:
            SimulationError: it does not in time, or has ended.

        """
        line = f'"event":"{event}"'
        deadline_s = time.monotonic() + READY_S
        while self.coordinator.log_path.read_text().count(line) < times:
            self.check()
            if time.monotonic() > deadline_s:
                message = (
                    f"{times} times {event} is awaited in the coordinator's log; its last lines:\n"
                    f"{self.coordinator.tail()}"
                )
                raise SimulationError(message)
            time.sleep(_LOOK_S)

    def url(self) -> str:
        """Find out where the coordinator is served over HTTP; its tables must ask for that.

        Raises:
            SimulationError: it does not say so in time, or has ended.

        """
        self.wait_for_log("http.ready", 1)
        match = re.search(r'"http.ready","url":"([^"]+)"', self.coordinator.log_path.read_text())
        if match is None:
            message = "the coordinator does not say where it is served"
            raise SimulationError(message)
        return match[1]

    def _end_ranks(self) -> None:
        for rank in self._started:
            rank.hang_up()
        for rank in self._started:
            rank.end()

    def _make_directory(self) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="kvc-"))
        if len(str(directory)) > _MAX_DIRECTORY:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
        self._cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        return directory

    def _make_environment(self, import_from: Path | None, path: Iterable[str]) -> dict[str, str]:
        places = [str(import_from)] if import_from else []
        places += [place or str(Path.cwd()) for place in path]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            # What the coordinator puts into a directory of its own goes with ours, even if it is killed.
            "TMPDIR": str(self.directory),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def _not_ready(self) -> SimulationError:
        missing = ", ".join(rank.name for rank in self._awaited.values())
        tails = "\n".join(rank.child.tail() for rank in self._awaited.values())
        return SimulationError(
            f"did not start within {_CONNECT_S:g} s: {missing}\n{tails}\n"
            f"the coordinator's last lines:\n{self.coordinator.tail()}"
        )


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of the monotonic clock, which all processes of a host share."""
    time.sleep(max(0.0, moment_s - time.monotonic()))
