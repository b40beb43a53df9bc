"""Real worker processes under the coordinator's supervision: they start, die, come back, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from coordinator.channel import Channel
from coordinator.groups import Group, Rank
from coordinator.messages import (
    Commands,
    ConnectPeer,
    Move,
    Pool,
    Reports,
    Role,
    WorkerHello,
    decode_from_peer,
    decode_to_worker,
    encode,
)
from coordinator.worker import supervisor
from coordinator.worker.settings import WorkerSettings, new_pool_path
from coordinator.worker.supervisor import CommandQueue, Worker, WorkerState
from tests.service.peers import LAYOUT, PAGES, hello, pages
from tests.service.stage import Stage, VirtualStage, now_s, virtual_time
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from coordinator.messages import Command

SIZE_BYTES = LAYOUT.pool_bytes(PAGES, 1)


@pytest.fixture
def pool() -> Iterator[Pool]:
    path = Path(new_pool_path())
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(SIZE_BYTES)
    yield Pool(str(path), SIZE_BYTES, PAGES)
    path.unlink()


class Desk:
    """Stands where the service stands: hears hellos and deaths."""

    def __init__(self, address: str, pool: Pool) -> None:
        self.deaths: list[str] = []
        self.pool = pool
        self.address = address
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(address)
        self.channel = Channel(router, self._on_message)
        stage = Stage()
        rank = hello(stage, Role.PREFILL, "p", 0, 1)
        stage.service._control.close()
        stage.service._outcomes.close()
        self.worker = Worker(Rank(Group(rank), rank, b"", 0, 0.0), self.settings, self)

    def settings(self, token: str) -> WorkerSettings:
        """How to start the worker."""
        return WorkerSettings(
            control=self.address,
            token=token,
            label=f"p-0-{token[:8]}",
            backend="loopback",
            options={},
            pool=self.pool,
            layout=LAYOUT,
            world_size=1,
            rank=0,
            heartbeat_s=0.1,
        )

    def worker_down(self, worker: Worker, cause: str) -> None:
        """Note a death."""
        assert worker is self.worker
        self.deaths.append(cause)

    def _on_message(self, frames: list[bytes]) -> None:
        message = decode_from_peer(frames[1])
        if isinstance(message, WorkerHello) and message.token == self.worker.token:
            self.worker.up(frames[0], lands_after_settled=message.lands_after_settled)
        else:
            assert isinstance(message, Reports)

    @property
    def pid(self) -> int:
        """The process of the present life."""
        assert self.worker._process is not None
        return self.worker._process.pid

    def state(self) -> WorkerState:
        """Where the worker stands now."""
        return self.worker.state

    async def up(self, life: int) -> None:
        """Wait until a life has introduced itself."""
        await eventually_async(lambda: self.worker.identity is not None and self.worker.lives == life, 20)


@asynccontextmanager
async def desk(address: str, pool: Pool) -> AsyncIterator[Desk]:
    here = Desk(address, pool)
    here.channel.start()
    here.worker.start()
    try:
        yield here
    finally:
        await here.worker.stop()
        here.channel.close()


async def test_a_worker_that_is_killed_comes_back_and_one_that_is_stopped_does_not(
    ipc_address: str, pool: Pool
) -> None:
    """Case C08."""
    async with desk(ipc_address, pool) as here:
        await here.up(1)
        assert here.state() is WorkerState.UP
        first = here.pid
        os.kill(first, signal.SIGSEGV)
        await here.up(2)
        assert here.deaths == [f"killed by signal {signal.SIGSEGV.value}"]
        assert here.pid != first
        here.worker.kill("the test says so")
        await here.up(3)
        assert here.deaths[1:] == ["killed by signal 9"]
        started_s = now_s()
        await here.worker.stop()
        assert now_s() - started_s < supervisor.STOP_S
        assert here.deaths[2:] == ["exit code 0 (stopped)"]
        assert here.state() is WorkerState.STOPPED
        assert here.worker.identity is None


async def test_a_worker_that_hangs_is_stopped_by_force(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 0.2)
    async with desk(ipc_address, pool) as here:
        await here.up(1)
        os.kill(here.pid, signal.SIGSTOP)
        await here.worker.stop()
        assert here.deaths == ["killed by signal 9"]


async def test_a_worker_that_never_introduces_itself_is_started_anew(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C04."""
    monkeypatch.setattr(supervisor, "START_S", 0.5)
    async with desk(ipc_address, pool) as here:
        await eventually_async(lambda: here.worker._process is not None)
        os.kill(here.pid, signal.SIGSTOP)
        await eventually_async(lambda: here.deaths)
        assert here.deaths == ["killed by signal 9"]
        monkeypatch.setattr(supervisor, "START_S", 60.0)
        await eventually_async(lambda: here.worker.identity is not None, 20)
        assert here.worker.lives >= 2


async def test_a_worker_that_has_introduced_itself_is_left_alone_when_the_time_for_that_is_over(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(ipc_address, pool) as here:
        await here.up(1)
        process = here.worker._process
        assert process is not None
        killed: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(here.worker, "kill", killed.append)
            here.worker._overdue(process)
            assert not killed
            here.worker.identity = None
            here.worker._overdue(process)
            assert killed == ["did not introduce itself within 120 s"]


async def test_a_bug_in_the_supervision_is_heard_of_and_leaves_no_process(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> WorkerSettings:
        message = "as the test says"
        raise ZeroDivisionError(message)

    with capture() as log:
        async with desk(ipc_address, pool) as here:
            monkeypatch.setattr(here.worker, "_settings", broken)
            await eventually_async(lambda: here.deaths)
            assert here.deaths == ["its supervision failed: as the test says"]
            assert here.worker.trouble == here.deaths[0]
            assert here.worker.hopeless
            assert here.state() is WorkerState.DOWN
            process = here.worker._process
            assert process is not None
            assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL
    assert len(log.of("worker.unsupervised")) == 1


async def test_a_worker_that_cannot_start_is_not_tried_again(ipc_address: str) -> None:
    missing = Pool(new_pool_path(), SIZE_BYTES, PAGES)
    with capture() as log:
        async with desk(ipc_address, missing) as here:
            await eventually_async(lambda: here.deaths, 20)
            assert here.deaths == ["exit code 3 (pool)"]
            assert here.worker.hopeless
            assert here.worker._task is not None
            await here.worker._task
            assert here.worker.lives == 1
    (died,) = log.of("worker.died")
    assert (died["rank"], died["cause"], died["restarts"]) == ("p/0", "exit code 3 (pool)", False)


async def test_nobody_introduces_himself_as_a_life_that_is_over(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", (60.0,))
    async with desk(ipc_address, pool) as here:
        await here.up(1)
        assert here.worker.token
        os.kill(here.pid, signal.SIGKILL)
        await eventually_async(lambda: here.deaths)
        assert here.worker.token == b""
        assert here.state() is WorkerState.DOWN
        assert here.worker.trouble == "killed by signal 9"


async def test_what_waits_for_the_next_life_is_not_sent_to_anybody_before_it_is_up(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", (0.1,))
    async with desk(ipc_address, pool) as here:
        await here.up(1)
        os.kill(here.pid, signal.SIGKILL)
        await eventually_async(lambda: here.deaths)
        here.worker.up(b"late", lands_after_settled=True)
        await eventually_async(lambda: here.worker.lives == 2)
        commands, line = queue(here.worker)
        commands.put(move(1))
        await asyncio.sleep(0)
        assert not line.messages
        await here.up(2)
        commands.flush()
        assert line.messages == [[move(1)]]


async def test_a_program_that_cannot_be_started_is_tried_again(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        async with desk(ipc_address, pool) as here:
            await eventually_async(lambda: len(here.deaths) >= 2)
            assert all(cause.startswith("cannot be started: ") for cause in here.deaths)
            assert not here.worker.hopeless
            patch.undo()
            await eventually_async(lambda: here.worker.identity is not None, 20)


async def test_a_worker_that_dies_at_once_is_started_ever_more_rarely(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", (0.0, 0.0, 0.05, 5.0))
    async with desk(ipc_address, pool) as here:
        await eventually_async(lambda: len(here.deaths) == 3)
        await asyncio.sleep(0.3)
        assert len(here.deaths) == 3
        assert set(here.deaths) == {"exit code 1 (crashed)"}
        started_s = now_s()
        await here.worker.stop()
        assert now_s() - started_s < 1.0


@virtual_time
async def test_a_worker_that_hangs_in_the_kernel_does_not_keep_the_coordinator_from_its_end() -> None:
    """Case C53."""
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair()
        worker = stage.worker(prefill[0])
        worker.immortal = True
        began_s = now_s()
        with capture() as log:
            await stage.service._stop_workers()
        assert now_s() - began_s < 5
        assert [line["rank"] for line in log.of("worker.left_behind")] == ["p/0"]


# --- the queue of commands -------------------------------------------------------------------


class Line:
    """Takes what a queue sends."""

    def __init__(self) -> None:
        self.messages: list[list[Command]] = []
        self.works = True

    def send(self, frames: list[bytes]) -> bool:
        """Take one message."""
        if self.works:
            message = decode_to_worker(frames[1])
            assert isinstance(message, Commands)
            self.messages.append(message.items)
        return self.works


def queue(worker: Worker) -> tuple[CommandQueue, Line]:
    line = Line()
    return CommandQueue(line.send, worker), line


def move(number: int, count: int = 1) -> Move:
    return Move(number, "d/0", pages(0) * count, pages(1) * count)


async def test_commands_of_one_turn_are_one_message_in_order(ipc_address: str, pool: Pool) -> None:
    here = Desk(ipc_address, pool)
    commands, line = queue(here.worker)
    commands.put(move(1))
    await asyncio.sleep(0)
    assert not line.messages
    here.worker.up(b"it", lands_after_settled=True)
    commands.put(move(2))
    commands.put(move(3))
    await asyncio.sleep(0)
    assert line.messages == [[move(1), move(2), move(3)]]
    commands.put(move(4))
    await asyncio.sleep(0)
    assert line.messages[1:] == [[move(4)]]
    here.channel.close()


async def test_large_endpoints_are_several_messages_too(ipc_address: str, pool: Pool) -> None:
    here = Desk(ipc_address, pool)
    commands, line = queue(here.worker)
    here.worker.up(b"it", lands_after_settled=True)
    connects = [ConnectPeer(f"d/{rank}", bytes(1 << 20), LAYOUT, 16, rank, PAGES) for rank in range(9)]
    for connect in connects:
        commands.put(connect)
    await asyncio.sleep(0)
    assert [len(message) for message in line.messages] == [4, 4, 1]
    assert [command for message in line.messages for command in message] == connects
    here.channel.close()


async def test_nothing_good_is_supposed_of_a_worker_that_has_not_introduced_itself(
    ipc_address: str, pool: Pool
) -> None:
    here = Desk(ipc_address, pool)
    before = here.worker.lands_after_settled
    here.worker.up(b"it", lands_after_settled=False)
    assert (before, here.worker.lands_after_settled) == (True, False)
    here.channel.close()


async def test_many_commands_and_large_ones_are_several_messages(ipc_address: str, pool: Pool) -> None:
    here = Desk(ipc_address, pool)
    commands, line = queue(here.worker)
    here.worker.up(b"it", lands_after_settled=True)
    many = [move(number) for number in range(1500)] + [move(number, 2**18) for number in range(1500, 1510)]
    for command in many:
        commands.put(command)
    await asyncio.sleep(0)
    assert [command for message in line.messages for command in message] == many
    assert len(line.messages) >= 6
    assert all(len(encode(Commands(message))) < 16 << 20 for message in line.messages)
    here.channel.close()


async def test_a_move_can_be_taken_back_until_it_is_sent(ipc_address: str, pool: Pool) -> None:
    here = Desk(ipc_address, pool)
    commands, line = queue(here.worker)
    for number in (1, 2, 3):
        commands.put(move(number))
    assert commands.withdraw(2)
    assert not commands.withdraw(2)
    assert not commands.withdraw(99)
    here.worker.up(b"it", lands_after_settled=True)
    commands.flush()
    assert not commands.withdraw(1)
    assert line.messages == [[move(1), move(3)]]
    commands.put(move(4))
    assert commands.clear() == [move(4)]
    assert not commands.withdraw(4)
    here.channel.close()


async def test_a_worker_that_does_not_read_is_killed(
    ipc_address: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Desk(ipc_address, pool)
    commands, line = queue(here.worker)
    killed: list[str] = []
    monkeypatch.setattr(here.worker, "kill", killed.append)
    here.worker.up(b"it", lands_after_settled=True)
    line.works = False
    commands.put(move(1))
    await asyncio.sleep(0)
    assert killed == ["does not read its commands"]
    here.channel.close()
