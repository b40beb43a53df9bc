"""The worker as a real process: a ROUTER stands for the coordinator."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import zmq

from coordinator import messages
from coordinator.messages import (
    Commands,
    Connected,
    Fenced,
    FencePeer,
    MoveDone,
    MoveFailed,
    Pool,
    Refused,
    Reports,
    Resend,
    Revoke,
    Stop,
    WorkerHello,
)
from coordinator.worker.process import CLOSE_S
from coordinator.worker.settings import (
    ExitCode,
    WorkerSettings,
    decode_settings,
    encode_settings,
    new_pool_path,
)
from tests.worker.support import LAYOUT, PAGES, PATIENCE_S, PoolFile, Receiver, eventually, move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from coordinator.messages import Command, Report, ToWorker

    Start = Callable[..., "WorkerProcess"]

PATIENCE_MS = int(1000 * PATIENCE_S)
COMMAND = [sys.executable, "-m", "coordinator.worker"]


class WorkerProcess:
    """One worker process, and the coordinator's end of its connection."""

    def __init__(self, router: zmq.Socket[bytes], settings: WorkerSettings, log: Path) -> None:
        self.router = router
        self.log = log
        self.reports: list[Report] = []
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        assert self.process.stdin is not None
        self.process.stdin.write(encode_settings(settings))
        self.process.stdin.flush()
        self.identity = b""

    def receive(self) -> messages.FromPeer:
        """Receive the next message."""
        assert self.router.poll(PATIENCE_MS), self.log.read_text()
        identity, frame = self.router.recv_multipart()
        self.identity = self.identity or identity
        assert identity == self.identity
        return messages.decode_from_peer(frame)

    def hello(self) -> WorkerHello:
        """Receive the first message."""
        message = self.receive()
        assert isinstance(message, WorkerHello)
        return message

    def send(self, message: ToWorker) -> None:
        """Send a message."""
        self.send_frames(messages.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        """Send anything."""
        self.router.send_multipart([self.identity, *frames])

    def command(self, *commands: Command) -> None:
        """Send commands."""
        self.send(Commands(list(commands)))

    def wait_for(self, kind: type[Report]) -> Report:
        """Return the next report of this kind; those before it are passed over."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            while self.reports:
                report = self.reports.pop(0)
                if isinstance(report, kind):
                    return report
            message = self.receive()
            assert isinstance(message, Reports)
            self.reports += message.items
        pytest.fail(f"{kind} did not come")

    def exit_code(self) -> int:
        """Wait for the end."""
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Make sure that it is gone."""
        with self.process:
            self.process.kill()


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    file = PoolFile(seed=1)
    yield file
    file.remove()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{tmp_path}/control")
        yield socket


@pytest.fixture
def settings(router: zmq.Socket[bytes], pool: PoolFile) -> WorkerSettings:
    return WorkerSettings(
        control=router.get_string(zmq.LAST_ENDPOINT),
        token=secrets.token_hex(32),
        label="prefill-0:0",
        backend="loopback",
        options={},
        pool=Pool(pool.path, pool.size_bytes, PAGES),
        layout=LAYOUT,
        world_size=1,
        rank=0,
        heartbeat_s=60.0,
    )


@pytest.fixture
def start(router: zmq.Socket[bytes], settings: WorkerSettings, tmp_path: Path, stack: ExitStack) -> Start:
    def start_worker(**changes: object) -> WorkerProcess:
        changed = msgspec.structs.replace(settings, **changes)
        worker = WorkerProcess(router, changed, tmp_path / "stderr")
        stack.callback(worker.close)
        return worker

    return start_worker


def is_gone(pid: int) -> bool:
    """Whether a process that may not be our child has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


# --- service -----------------------------------------------------------------------------------


def test_a_worker_introduces_itself_moves_pages_and_stops(
    start: Start, settings: WorkerSettings, pool: PoolFile, receiver: Receiver
) -> None:
    worker = start()
    hello = worker.hello()
    assert hello.version == messages.VERSION
    assert hello.token.hex() == settings.token
    assert hello.pid == worker.process.pid
    assert hello.lands_after_settled is False

    worker.command(receiver.connect(), move(1, receiver, [3, 5], [7, 9]))
    worker.wait_for(Connected)
    done = worker.wait_for(MoveDone)
    assert isinstance(done, MoveDone)
    assert (done.move, done.size_bytes) == (1, 2 * LAYOUT.planes * LAYOUT.page_bytes(1))
    assert np.array_equal(receiver.pool.by_page[:, [7, 9]], pool.by_page[:, [3, 5]])
    assert not np.delete(receiver.pool.by_page, [7, 9], axis=1).any()

    worker.command(move(2, receiver, [64]), FencePeer(receiver.peer))
    assert isinstance(worker.wait_for(MoveFailed), MoveFailed)
    assert worker.wait_for(Fenced) == Fenced(receiver.peer, "")
    worker.send(Stop())
    assert worker.exit_code() == ExitCode.STOPPED


def test_an_idle_worker_gives_signs_of_life(start: Start) -> None:
    worker = start(heartbeat_s=0.05)
    worker.hello()
    for _ in range(3):
        assert worker.receive() == Reports([])


def test_it_says_nothing_between_two_signs_of_life_but_what_it_has_to_say(start: Start) -> None:
    worker = start(heartbeat_s=60.0)
    worker.hello()
    for peer in ("d/0", "d/1"):
        worker.command(FencePeer(peer))
        assert worker.receive() == Reports([Fenced(peer)])


def test_more_reports_than_fit_into_one_message_arrive_in_order(start: Start, receiver: Receiver) -> None:
    worker = start()
    worker.hello()
    count = messages.MAX_ITEMS + 500
    worker.command(*(move(number, receiver, [1]) for number in range(1, count + 1)))

    seen: list[int] = []
    while len(seen) < count:
        message = worker.receive()
        assert isinstance(message, Reports)
        seen += [report.move for report in message.items if isinstance(report, MoveFailed)]
    assert seen == list(range(1, count + 1))


def test_what_is_not_a_message_is_ignored_and_the_next_one_served(start: Start, receiver: Receiver) -> None:
    """Case C39."""
    worker = start()
    worker.hello()
    worker.send_frames(b"")
    worker.send_frames(b"\xc1garbage")
    worker.send_frames(messages.encode(Commands([])), b"second frame")
    worker.send_frames(messages.encode(Resend(3)))
    worker.send_frames(msgspec.msgpack.encode(["commands", [["move", "x", 1, 2, 3]]]))
    worker.command(receiver.connect(), move(1, receiver, [1]), Revoke([99]))

    worker.wait_for(MoveDone)
    log = worker.log.read_text()
    assert log.count("ignored from the coordinator") == 5
    assert "a message of 2 frames" in log


def test_nothing_reaches_the_stdout_that_it_was_started_with(start: Start) -> None:
    """Native libraries print to stdout: there it lands on stderr."""
    worker = start()
    worker.hello()
    descriptors = Path(f"/proc/{worker.process.pid}/fd")
    assert (descriptors / "1").readlink() == (descriptors / "2").readlink()
    worker.send(Stop())
    worker.exit_code()
    assert worker.process.stdout is not None
    assert worker.process.stdout.read() == b""


def test_a_call_that_hangs_stops_neither_the_signs_of_life_nor_the_stop(
    start: Start, receiver: Receiver
) -> None:
    worker = start(heartbeat_s=0.05, options={"faults": [{"kind": "hang"}]})
    worker.hello()
    worker.command(receiver.connect(), move(1, receiver, [1]))
    worker.wait_for(Connected)
    for _ in range(3):
        assert worker.receive() == Reports([])
    started_s = time.monotonic()
    worker.send(Stop())

    assert worker.exit_code() == ExitCode.STOPPED
    assert time.monotonic() - started_s < CLOSE_S + 3
    assert "did not end within" in worker.log.read_text()


def test_a_crash_of_the_engine_costs_the_worker_only(start: Start, receiver: Receiver) -> None:
    """Case C08."""
    worker = start(options={"faults": [{"kind": "crash"}]})
    worker.hello()
    worker.command(receiver.connect(), move(1, receiver, [1]))

    assert worker.exit_code() == -signal.SIGABRT
    assert not receiver.pool.bytes.any()


# --- ends --------------------------------------------------------------------------------------


def test_the_end_of_stdin_ends_it(start: Start) -> None:
    worker = start()
    worker.hello()
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.exit_code() == ExitCode.STOPPED


def test_an_interrupt_is_for_the_coordinator(start: Start) -> None:
    worker = start(heartbeat_s=0.05)
    worker.hello()
    worker.process.send_signal(signal.SIGINT)
    for _ in range(5):
        worker.receive()
    assert worker.process.poll() is None


def test_it_dies_with_its_parent_even_when_stdin_stays_open(
    router: zmq.Socket[bytes], settings: WorkerSettings, tmp_path: Path
) -> None:
    """The pipe to its stdin is held here as well, so that only the kernel can tell it."""
    parent_code = f"""
        import subprocess, time
        subprocess.Popen({COMMAND!r}, stdin=0)
        time.sleep(60)
    """
    reading, writing = os.pipe()
    with (tmp_path / "stderr").open("wb") as stderr:
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(parent_code)], stdin=reading, stderr=stderr
        )
    os.close(reading)
    try:
        os.write(writing, encode_settings(settings))
        assert router.poll(PATIENCE_MS), (tmp_path / "stderr").read_text()
        hello = messages.decode_from_peer(router.recv_multipart()[1])
        assert isinstance(hello, WorkerHello)
        assert not is_gone(hello.pid)

        parent.kill()

        assert eventually(lambda: is_gone(hello.pid))
    finally:
        parent.kill()
        parent.wait()
        os.close(writing)


def test_a_refused_worker_ends(start: Start) -> None:
    worker = start()
    worker.hello()
    worker.send(Refused("token", "this token is not known"))
    assert worker.exit_code() == ExitCode.REFUSED
    assert "this token is not known" in worker.log.read_text()


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"backend": "loopbak"}, ExitCode.BACKEND, "no backend named 'loopbak'; known: loopback"),
        ({"options": {"falts": 1}}, ExitCode.BACKEND, "falts"),
        ({"pool": Pool("/etc/passwd", 1, PAGES)}, ExitCode.POOL, "'/etc/passwd' is not a pool"),
        ({"pool": Pool(new_pool_path(), 4096, PAGES)}, ExitCode.POOL, "must share one /dev/shm"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, kv_heads=2), "world_size": 3},
            ExitCode.POOL,
            "kv_heads is 2, must divide by the 3 TP ranks",
        ),
    ],
)
def test_a_worker_that_cannot_start_says_why_and_how(
    start: Start, changes: dict[str, object], code: ExitCode, text: str
) -> None:
    worker = start(**changes)
    assert worker.exit_code() == code
    assert text in worker.log.read_text().splitlines()[-1]


def test_a_worker_that_finds_no_descriptor_for_its_pool_may_be_started_again(
    settings: WorkerSettings,
) -> None:
    code = (
        "import os, resource\n"
        "from coordinator.worker import process\n"
        "free = os.dup(0); os.close(free)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))\n"  # one, for its outbox
        "process.main()"
    )
    line = encode_settings(settings)
    ended = subprocess.run(
        [sys.executable, "-c", code], input=line, capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == ExitCode.BUSY, ended.stderr.decode()
    assert "Too many open files; raise the limit of open files" in ended.stderr.decode().splitlines()[-1]


def test_a_pool_of_another_size_than_its_pages_need_is_refused(start: Start, pool: PoolFile) -> None:
    worker = start(pool=Pool(pool.path, pool.size_bytes, PAGES - 1))
    assert worker.exit_code() == ExitCode.POOL
    assert f"has {pool.size_bytes} bytes, 63 pages need" in worker.log.read_text()


@pytest.mark.parametrize(
    ("stdin", "text"),
    [
        (b"", "stdin ended before the end of the line"),
        (b"{}", "stdin ended before the end of the line"),
        (b"{}\n", "missing required field"),
        (b"\xff\n", "worker settings"),
        (b" " * (2 << 20) + b"\n", "longer than 1048576 bytes"),
    ],
)
def test_settings_that_cannot_be_used_end_it_at_once(stdin: bytes, text: str) -> None:
    ended = subprocess.run(COMMAND, input=stdin, capture_output=True, timeout=30, check=False)
    assert ended.returncode == ExitCode.SETTINGS
    assert text in ended.stderr.decode()
    assert ended.stdout == b""


# --- settings ----------------------------------------------------------------------------------


def test_settings_survive_their_way(settings: WorkerSettings) -> None:
    line = encode_settings(settings)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_settings(line) == settings


def test_the_coordinator_can_import_the_settings_without_numpy_or_a_backend() -> None:
    code = (
        "import sys, coordinator.worker.settings;"
        "print([m for m in ('numpy', 'torch', 'zmq') if m in sys.modules],"
        "      [m for m in sys.modules if m.startswith('backends')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
    assert ended.stdout == b"[] []\n"
