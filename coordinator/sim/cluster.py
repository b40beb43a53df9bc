"""A whole deployment on this host: a coordinator, simulated engines, and the driver's ear.

Everything runs in one thread: call ``pump`` (or ``wait_until``) to hear the ranks and to notice
processes that have died. A cluster is a context manager; at its end nothing is left behind: no
process, no socket file, no shared memory.

    with Cluster(ClusterOptions(backend="loopback")) as cluster:
        prefill = cluster.add(Role.PREFILL, "prefill-0", 2)
        decode = cluster.add(Role.DECODE, "decode-0", 2)
        cluster.wait_ready()
        cluster.hand_off([Request(room=1, pages=8, chunk_pages=4)], prefill, decode)
        cluster.wait_until(lambda: not cluster.book.open, 30, "the handoff")
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import zmq

from coordinator.messages import Role
from coordinator.sim.book import Book, Party
from coordinator.sim.coordinator_process import CoordinatorProcess
from coordinator.sim.engine import Sabotage
from coordinator.sim.errors import SimulationError
from coordinator.sim.forks import ForkServer
from coordinator.sim.group import EngineGroup
from coordinator.sim.settings import RankSettings
from coordinator.sim.wire import Ready, decode_reports, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.layout import Layout
    from coordinator.sim.child import Child
    from coordinator.sim.options import ClusterOptions
    from coordinator.sim.wire import Command, Request

#: Longest path of a socket that the kernel takes, less the longest name that we use.
_MAX_DIRECTORY: Final = 60
#: Reports taken before the caller gets its turn again.
_MAX_REPORTS: Final = 256
_ENDING_S: Final = 10.0
#: The coordinator's log has this line once for each start of a worker.
_WORKER_UP: Final = '"event":"worker.up"'


class Cluster:
    """One coordinator and any number of engines.

    Attributes:
        book: what became of every handoff.
        groups: the engines, by name.
        coordinator: a handle on the coordinator's process.
        directory: where sockets, configuration and logs lie.

    """

    def __init__(self, options: ClusterOptions, forks: ForkServer | None = None) -> None:
        """Start the coordinator.

        Args:
            options: how everything is built.
            forks: where ranks are started; None: a fork server of our own, ready after two seconds.

        Raises:
            SimulationError: a process cannot be started.

        """
        self.options = options
        self.book = Book()
        self.groups: dict[str, EngineGroup] = {}
        self._cleanup = ExitStack()
        try:
            self.directory = self._make_directory()
            self._context = zmq.Context()
            self._cleanup.callback(self._context.destroy, 0)
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(self._reports_address)
            self.coordinator = CoordinatorProcess(self.directory, self._config(), self._environment)
            self._cleanup.callback(self.coordinator.end)
            self._forks = forks or self._own_forks()
            self.coordinator.start()
        except BaseException:
            self._cleanup.close()
            raise

    @property
    def _reports_address(self) -> str:
        return f"ipc://{self.directory}/reports"

    def add(self, role: Role, name: str, world_size: int, layout: Layout | None = None) -> EngineGroup:
        """Start an engine, of the options' layout if none is given; ``wait_ready`` waits for it.

        Raises:
            SimulationError: the name is taken, or a process cannot be started.

        """
        if name in self.groups:
            message = f"there is a group {name} already"
            raise SimulationError(message)
        settings = RankSettings(
            role=role,
            group=name,
            rank=0,
            world_size=world_size,
            control=self.coordinator.control,
            reports=self._reports_address,
            directory=str(self.directory),
            backend=self.options.backend,
            private=self.options.hosting == "rank" and role is Role.PREFILL,
            layout=layout or self.options.layout,
            pages=self.options.pages,
            options=dict(self.options.options),
            step_s=self.options.step_s,
            ready_timeout_s=self.options.ready_timeout_s,
            step_timeout_s=self.options.step_timeout_s,
            sabotage=self.options.sabotage.get(name, Sabotage.NONE),
            sabotage_rank=world_size - 1,
            program=self.options.program,
        )
        group = EngineGroup(settings, self._start_rank, self._send, self.book.lose)
        self.groups[name] = group
        self._cleanup.callback(group.join, 0)
        group.start()
        return group

    def wait_ready(self) -> None:
        """Wait until every rank of every group is registered and hears the coordinator.

        Raises:
            SimulationError: it takes longer than ``ready_timeout_s``; the text names who is missing.

        """
        self.wait_until(
            lambda: all(group.is_ready for group in self.groups.values()),
            self.options.ready_timeout_s,
            "all engines to be ready",
            self._not_ready,
        )

    def wait_workers(self) -> None:
        """Wait until the coordinator's workers are up, one for each prefill rank that has started so far.

        Raises:
            SimulationError: it takes longer than ``ready_timeout_s``.

        """
        ranks = sum(group.world_size for group in self.groups.values() if group.role is Role.PREFILL)
        log = self.coordinator.log_path
        self.wait_until(
            lambda: log.read_text().count(_WORKER_UP) >= ranks,
            self.options.ready_timeout_s,
            "all workers to be up",
            self.coordinator.tail,
        )

    def hand_off(self, requests: Sequence[Request], prefill: EngineGroup, decode: EngineGroup) -> None:
        """Give requests to both engines, as a router does.

        Raises:
            SimulationError: a room is still in use, a prompt is larger than a pool, or an engine is gone.

        """
        for request in requests:
            if not 1 <= request.pages <= self.options.pages:
                message = f"room {request.room} has {request.pages} pages, a pool has {self.options.pages}"
                raise SimulationError(message)
            self.book.begin(request, prefill.party, decode.party)
        prefill.submit(requests)
        decode.submit(requests)

    def pump(self, timeout_s: float) -> None:
        """Take what the ranks report, waiting at most ``timeout_s`` for the first of it.

        Raises:
            SimulationError: a process has died that nobody killed; the text has its last lines.

        """
        if self._socket.poll(round(timeout_s * 1000)):
            for _ in range(_MAX_REPORTS):
                try:
                    _, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(frame)
        self.coordinator.check()
        for group in self.groups.values():
            group.check()

    def wait_until(
        self,
        condition: Callable[[], bool],
        timeout_s: float,
        what: str,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """Pump until ``condition`` holds.

        Raises:
            SimulationError: it does not within ``timeout_s``; the text says what was waited for.

        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                message = f"waited {timeout_s:g} s for {what}; {missing()}"
                raise SimulationError(message)
            self.pump(min(left_s, 0.1))

    def finish(self, timeout_s: float) -> None:
        """End all engines in good order and take their final reports into the book.

        Raises:
            SimulationError: one does not report in time.

        """
        for group in self.groups.values():
            group.finish()
        self.wait_until(
            lambda: all(
                len(self.book.finals.get(group.party, {})) == group.world_size
                for group in self.groups.values()
            ),
            timeout_s,
            "the final reports of all engines",
        )
        for group in self.groups.values():
            group.join(_ENDING_S)
            group.check()

    def finish_clean(self, timeout_s: float) -> list[str]:
        """End all engines; say in a sentence each what a rank was left with that must be free."""
        try:
            self.finish(timeout_s)
        except SimulationError as error:
            return [str(error)]
        return [
            f"{party} rank {rank} ended with {last.free_pages} of {self.options.pages} pages free, "
            f"holding rooms {last.held}"
            for party, lasts in self.book.finals.items()
            for rank, last in lasts.items()
            if last.held or last.free_pages != self.options.pages
        ]

    def close(self) -> None:
        """End everything that still runs, and remove every trace."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _make_directory(self) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="kvc-"))
        if len(str(directory)) > _MAX_DIRECTORY:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
        self._cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        return directory

    def _own_forks(self) -> ForkServer:
        forks = ForkServer(self.directory, self._environment)
        self._cleanup.callback(forks.close)
        return forks

    def _start_rank(self, settings: RankSettings) -> Child:
        log = self.directory / f"{settings.group}-{settings.incarnation}-{settings.rank}.log"
        return self._forks.start(settings, self._environment, log)

    def _config(self) -> dict[str, dict[str, object]]:
        tables: dict[str, dict[str, object]] = {
            "backend": {"name": self.options.backend, "hosting": self.options.hosting},
            "handoff": {"deadline_s": 60.0},
            "shutdown": {"grace_s": 1.0},
        }
        if self.options.options:
            tables[f"backend.options.{self.options.backend}"] = dict(self.options.options)
        for name, table in self.options.coordinator.items():
            tables.setdefault(name, {}).update(table)
        return tables

    @property
    def _environment(self) -> dict[str, str]:
        # One thread each: the ranks share few cores. What a killed process leaves goes with our directory.
        ours = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.directory)}
        return {**os.environ, **ours, **self.options.environment}

    def _send(self, party: Party, command: Command) -> None:
        label = f"{party.group}#{party.incarnation}/0"
        try:
            self._socket.send_multipart((label.encode(), encode(command)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            message = f"{party} rank 0 does not take commands: {error}"
            raise SimulationError(message) from error

    def _take(self, frame: bytes) -> None:
        reports = decode_reports(frame)
        group = self.groups[reports.group]
        for report in reports.items:
            if isinstance(report, Ready) and reports.incarnation == group.incarnation:
                group.ready[reports.rank] = report
        self.book.record(Party(group.name, reports.incarnation, group.world_size), reports)

    def _not_ready(self) -> str:
        missing = [
            f"{group.name} rank {rank}"
            for group in self.groups.values()
            for rank in range(group.world_size)
            if rank not in group.ready
        ]
        return f"not ready: {', '.join(missing)}; the coordinator's last lines:\n{self.coordinator.tail()}"
