"""Worker processes as the coordinator sees them: started, watched, killed, started again.

A worker is the place where native engines live and crash. One per prefill rank; its death costs the
moves that it had, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from coordinator.logs import get_logger
from coordinator.messages import MAX_ITEMS, Command, Commands, ConnectPeer, Move, Stop, encode
from coordinator.worker.settings import ExitCode, WorkerSettings, encode_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.groups import Rank
    from coordinator.messages import WorkerOrders

#: Pauses after the first, second ... early death in a row, seconds.
RESTART_PAUSES_S: Final = (0.0, 0.0, 0.2, 1.0, 5.0)
#: A death after a life this long is not an early one.
LONG_LIFE_S: Final = 30.0
#: How long a worker may take to introduce itself: registering a large pool takes its time.
START_S: Final = 120.0
#: How long a worker may take to end by itself before it is killed.
STOP_S: Final = 2.0
#: A message with commands that has this many bytes is full: a worker takes none over 64 MiB.
MESSAGE_BYTES: Final = 4 << 20
#: A worker that ended like this would end like this again.
_HOPELESS: Final = {ExitCode.SETTINGS, ExitCode.POOL, ExitCode.BACKEND, ExitCode.REFUSED}

_log = get_logger()


class WorkerState(StrEnum):
    """Where a worker stands."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    STOPPED = "stopped"


class WorkerEvents(Protocol):
    """Who hears of a worker's lives."""

    def worker_down(self, worker: Worker, cause: str) -> None:
        """A life of the worker is over; what it had under way is quiet at the source."""


class Worker:
    """The worker of one prefill rank, over all its lives.

    Attributes:
        rank: whose pool it sends from.
        token: the secret of its present life; empty between two lives.
        identity: its routing id on the control socket, while it is up.
        lives: how many processes it has had.
        trouble: why it is not up, when that is known.
        hopeless: it will not come up again.

    """

    def __init__(self, rank: Rank, settings: Callable[[str], WorkerSettings], events: WorkerEvents) -> None:
        """Describe the worker; ``settings(token)`` says how to start its next life."""
        self.rank = rank
        self.state = WorkerState.STARTING
        self.token = b""
        self.identity: bytes | None = None
        self.lives = 0
        self.trouble = ""
        self.hopeless = False
        self.lands_after_settled = True
        self._settings = settings
        self._events = events
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Names the worker in logs."""
        return f"worker of {self.rank.name}"

    @property
    def orders(self) -> WorkerOrders | None:
        """What its rank must know to run it; None when we do that."""
        return None

    def start(self) -> None:
        """Run it until ``stop``."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())
        self._task.add_done_callback(self._ended)

    def up(self, identity: bytes, *, lands_after_settled: bool) -> None:
        """Note that the present life has introduced itself."""
        self.identity = identity
        self.state = WorkerState.UP
        self.trouble = ""
        self.hopeless = False
        self.lands_after_settled = lands_after_settled
        _log.info("worker.up", rank=self.rank.name, life=self.lives)

    def kill(self, why: str) -> None:
        """End the present life by force; ``worker_down`` follows, then the next life."""
        process = self._process
        if process is not None and process.returncode is None:
            _log.warning("worker.killed", rank=self.rank.name, pid=process.pid, why=why)
            # It may have ended in this instant.
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def unheard(self, why: str) -> None:
        """It did not get its commands: end the present life."""
        self.kill(why)

    async def retire(self, why: str) -> None:
        """End it for good, by force; nothing moves on its account afterwards."""
        self.kill(why)
        await self.stop()

    async def stop(self) -> None:
        """End it for good: first politely (its stdin ends), then by force."""
        self.state = WorkerState.STOPPED
        self._stopping.set()
        self._end_input()
        if self._task is not None:
            _, running = await asyncio.wait({self._task}, timeout=STOP_S)
            if running:
                self.kill(f"did not stop within {STOP_S} s")
                await self._task

    def _end_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _supervise(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started_s = loop.time()
            cause, self.hopeless = await self._live()
            stopped = self._stopping.is_set()
            if not stopped:
                self.state = WorkerState.DOWN
                self.trouble = cause
                _log.error(
                    "worker.died",
                    rank=self.rank.name,
                    life=self.lives,
                    cause=cause,
                    restarts=not self.hopeless,
                )
            self._events.worker_down(self, cause)
            self.identity = None
            # What it has said may still be on its way; nobody is it any more.
            self.token = b""
            if stopped or self.hopeless:
                return
            failures = 0 if loop.time() - started_s > LONG_LIFE_S else failures + 1
            pause_s = RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """See that an end of the supervision by a bug is neither silent nor waited for."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.hopeless = True
            self.state = WorkerState.DOWN
            self.trouble = f"its supervision failed: {error}"
            _log.error("worker.unsupervised", rank=self.rank.name, exc_info=error)
            self.kill(self.trouble)
            self._events.worker_down(self, self.trouble)

    async def _live(self) -> tuple[str, bool]:
        """Run one life to its end; say why it ended and whether another one is pointless."""
        self.lives += 1
        self.identity = None
        self.token = secrets.token_bytes(32)
        self.state = WorkerState.STARTING
        self._process = None
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "coordinator.worker",
                stdin=asyncio.subprocess.PIPE,
                # Else numpy starts a thread for each core, for linear algebra: there is none here.
                env={"OPENBLAS_NUM_THREADS": "1"} | os.environ,
            )
        except OSError as error:
            return f"cannot be started: {error}", False
        overdue = asyncio.get_running_loop().call_later(START_S, self._overdue, process)
        try:
            stdin = process.stdin
            assert stdin is not None  # noqa: S101 - asked for above
            # Closed, or broken, when it died before it read its settings: its exit code says more.
            with contextlib.suppress(ConnectionError):
                if not stdin.is_closing():
                    stdin.write(encode_settings(self._settings(self.token.hex())))
                    await stdin.drain()
            if self._stopping.is_set():
                self._end_input()
            code = await process.wait()
        finally:
            overdue.cancel()
        if code < 0:
            return f"killed by signal {-code}", False
        known = code in ExitCode.__members__.values()
        return f"exit code {code}" + (f" ({ExitCode(code).name.lower()})" if known else ""), code in _HOPELESS

    def _overdue(self, process: asyncio.subprocess.Process) -> None:
        if process is self._process and self.identity is None:
            self.kill(f"did not introduce itself within {START_S:g} s")


class CommandQueue:
    """Sends commands to one life of a worker, those of one turn of the loop together."""

    def __init__(self, send: Callable[[list[bytes]], bool], worker: Worker) -> None:
        """Send with ``send``, which returns False when it cannot."""
        self._send = send
        self._worker = worker
        self._numbers = count()
        self._items: dict[int, Command] = {}
        # Where each move stands: a worker that is not up may have 100,000 moves waiting for it.
        self._moves: dict[int, int] = {}
        self._scheduled = False

    def put(self, command: Command) -> None:
        """Queue a command. While the worker is not up it waits there; see ``flush``."""
        number = next(self._numbers)
        self._items[number] = command
        if isinstance(command, Move):
            self._moves[command.move] = number
        if not self._scheduled and self._worker.identity is not None:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def withdraw(self, move: int) -> bool:
        """Take back a move; False when it was sent."""
        number = self._moves.pop(move, None)
        if number is None:
            return False
        del self._items[number]
        return True

    def clear(self) -> list[Command]:
        """Take back what was not sent."""
        items = list(self._items.values())
        self._items.clear()
        self._moves.clear()
        return items

    def flush(self) -> None:
        """Send what is queued, if the worker is up."""
        self._scheduled = False
        identity = self._worker.identity
        if identity is None:
            return
        while self._items:
            if not self._send([identity, encode(Commands(self._take()))]):
                # Its reader does nothing but read: a full queue means that the process is stuck.
                self._worker.unheard("does not read its commands")
                return

    def _take(self) -> list[Command]:
        """Take what goes into one message."""
        taken: list[Command] = []
        size_bytes = 0
        while self._items and len(taken) < MAX_ITEMS and size_bytes < MESSAGE_BYTES:
            number = next(iter(self._items))
            command = self._items.pop(number)
            taken.append(command)
            if isinstance(command, Move):
                del self._moves[command.move]
                size_bytes += 2 * len(command.source_pages)
            elif isinstance(command, ConnectPeer):
                size_bytes += len(command.endpoint)
        return taken

    def stop(self) -> None:
        """Ask the worker to end."""
        if self._worker.identity is not None:
            self._send([self._worker.identity, encode(Stop())])
