"""The coordinator as a process: what it loads, when it is ready, how it ends, who may connect."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest
import zmq
import zmq.auth

from coordinator.messages import (
    Broadcast,
    Offer,
    Outcome,
    Role,
    Submit,
    Welcome,
    decode_broadcast,
    decode_to_rank,
    encode,
)
from tests.service.peers import hello_of, pages
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.processes import Program, Programs

#: Until a program has started on a host that does much else.
PATIENCE_S: Final = 20.0
#: Nothing of these has any business in the coordinator's process.
HEAVY: Final = ("numpy", "torch", "nixl", "mooncake")


def lines(program: Program) -> list[dict[str, Any]]:
    """The log so far."""
    return [json.loads(line) for line in program.output().splitlines() if line.startswith("{")]


def said(program: Program, event: str) -> dict[str, Any]:
    """Wait for a line of the log."""

    def found() -> dict[str, Any]:
        ended = program.process.poll()
        entry = next((line for line in lines(program) if line["event"] == event), None)
        assert entry or ended is None, f"ended with {ended} and never said {event}:\n{program.output()}"
        return entry or {}

    return eventually(found, PATIENCE_S, f"{event} in the log")


@pytest.fixture
def configuration(short_dir: Path) -> Path:
    """A configuration on socket files of this test."""
    file = short_dir / "local.toml"
    file.write_text(
        f"""
        [listen]
        control = ["ipc://{short_dir}/control"]
        outcomes = ["ipc://{short_dir}/outcomes"]
        [http]
        address = "127.0.0.1:0"
        [release]
        settle_s = 0.2
        drain_s = 0.0
        [shutdown]
        grace_s = 0.3
        """
    )
    return file


@pytest.fixture
def serve(programs: Programs) -> Callable[[Path], Program]:
    """Start a coordinator and wait until it is ready."""

    def start(configuration: Path) -> Program:
        program = programs.python("-m", "coordinator", "serve", "--config", str(configuration))
        said(program, "coordinator.ready")
        return program

    return start


class Rank:
    """A decode rank that speaks the protocol over blocking sockets."""

    def __init__(self, address: str, **keys: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self._socket(zmq.DEALER, keys)
        self.control.connect(address)
        self.outcomes = self._socket(zmq.SUB, keys)
        transport = address.partition("://")[0]
        self.hello = hello_of(Role.DECODE, "d", 0, 1, backend="loopback", transport=transport)
        self.welcome: Welcome | None = None
        self.verdicts: list[Outcome] = []

    def _socket(self, kind: int, keys: dict[str, bytes]) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for name, key in keys.items():
            socket.setsockopt(getattr(zmq, f"CURVE_{name.upper()}KEY"), key)
        return socket

    def join(self, patience_s: float = PATIENCE_S) -> bool:
        """Say hello; whether a welcome came, and then a broadcast."""
        self.control.send(encode(self.hello))
        if not self.control.poll(int(1000 * patience_s)):
            return False
        answer = decode_to_rank(self.control.recv())
        assert isinstance(answer, Welcome), answer
        self.welcome = answer
        self.outcomes.connect(answer.outcomes)
        self.outcomes.setsockopt(zmq.SUBSCRIBE, b"d\0")
        self.hear()
        return True

    def hear(self) -> Broadcast:
        """Wait for a broadcast."""
        assert self.outcomes.poll(int(1000 * PATIENCE_S)), "no broadcast"
        return decode_broadcast(self.outcomes.recv_multipart()[1])

    def offer(self, room: int) -> None:
        """Offer a page for a room."""
        assert self.welcome is not None
        offer = Offer(room, 0, pages(1))
        self.control.send(encode(Submit(self.welcome.epoch, room, 0, 0, listening=True, items=[offer])))

    def outcome(self) -> Outcome:
        """Wait for the next verdict."""
        while not self.verdicts:
            self.verdicts += [event for event in self.hear().events if isinstance(event, Outcome)]
        return self.verdicts.pop(0)

    def close(self) -> None:
        """Close the sockets."""
        self.context.destroy(linger=0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Rank]]:
    """Make ranks that are closed at the end."""
    ranks = []

    def connected(address: str, **keys: bytes) -> Rank:
        ranks.append(Rank(address, **keys))
        return ranks[-1]

    yield connected
    for rank in ranks:
        rank.close()


# --- what it loads, and when it is ready -----------------------------------------------------


def test_the_service_imports_no_heavy_module(programs: Programs) -> None:
    program = programs.python(
        "-c",
        "import sys, coordinator.process, coordinator.http.server\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
    )
    assert program.wait() == 0
    assert program.output().strip() == "[]"


def test_the_process_has_no_native_engine_and_is_ready_soon(
    configuration: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    started_s = time.monotonic()
    program = programs.python("-m", "coordinator", "serve", "--config", str(configuration))
    ready = said(program, "coordinator.ready")
    said(program, "http.ready")
    ready_s = time.monotonic() - started_s
    with capsys.disabled():
        print(f"\nthe coordinator was ready after {ready_s:.2f} s")  # noqa: T201 - to be read by a person
    # One second is the promise on an idle host; this one is shared with other tests.
    assert ready_s < 10
    directory = configuration.parent
    assert ready["control"] == [f"ipc://{directory}/control"]
    assert ready["outcomes"] == [f"ipc://{directory}/outcomes"]
    assert ready["backend"] == "loopback"
    mapped = {mapping.path for mapping in psutil.Process(program.process.pid).memory_maps()}
    assert any("uvloop" in path for path in mapped)
    assert not [path for path in mapped for name in HEAVY if f"/{name}" in path]
    assert (directory / "control").stat().st_mode & 0o077 == 0


# --- how it ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_every_handoff_in_flight_is_told(
    configuration: Path,
    serve: Callable[[Path], Program],
    connect: Callable[..., Rank],
    number: signal.Signals,
) -> None:
    """Case C53."""
    program = serve(configuration)
    rank = connect(f"ipc://{configuration.parent}/control")
    assert rank.join()
    for room in (1, 2, 3):
        rank.offer(room)
    eventually(lambda: sum(line["event"] == "handoff.opened" for line in lines(program)) == 3)
    asked_s = time.monotonic()
    program.process.send_signal(number)
    told = [rank.outcome() for _ in range(3)]
    assert {outcome.room for outcome in told} == {1, 2, 3}
    assert {outcome.failure and outcome.failure.reason.value for outcome in told} == {"draining"}
    assert program.wait() == 0
    assert time.monotonic() - asked_s < 5
    assert [line["event"] for line in lines(program)][-1] == "coordinator.stopped"
    stopped = lines(program)[-1]
    assert (stopped["opened"], stopped["succeeded"], stopped["failed"]) == (3, 0, {"draining": 3})
    assert {path.name for path in configuration.parent.iterdir()} == {"local.toml"}


def test_a_second_signal_ends_it_at_once(
    configuration: Path, serve: Callable[[Path], Program], connect: Callable[..., Rank]
) -> None:
    configuration.write_text(configuration.read_text().replace("grace_s = 0.3", "grace_s = 600.0"))
    program = serve(configuration)
    rank = connect(f"ipc://{configuration.parent}/control")
    assert rank.join()
    rank.offer(1)
    said(program, "handoff.opened")
    program.process.terminate()
    said(program, "coordinator.draining")
    program.process.terminate()
    assert program.wait() == 0


def test_its_end_is_not_held_up_by_a_rank_that_hears_nothing(
    configuration: Path, serve: Callable[[Path], Program], connect: Callable[..., Rank]
) -> None:
    program = serve(configuration)
    rank = connect(f"ipc://{configuration.parent}/control")
    assert rank.join()
    rank.offer(1)
    said(program, "handoff.opened")
    rank.close()
    program.process.terminate()
    assert program.wait() == 0


def private_directories() -> set[Path]:
    """What the coordinators of this test run have for their workers."""
    return {path.parent for path in Path(tempfile.gettempdir()).glob("kv-coordinator-*/workers")}


# --- two of them -----------------------------------------------------------------------------


def test_a_second_coordinator_in_the_same_place_is_refused_with_a_sentence(
    configuration: Path, serve: Callable[[Path], Program], programs: Programs, connect: Callable[..., Rank]
) -> None:
    first = serve(configuration)
    second = programs.python("-m", "coordinator", "serve", "--config", str(configuration))
    assert second.wait(PATIENCE_S) == 2
    sentence = f"listen.control: another process listens on {configuration.parent}/control already"
    assert sentence in second.output()
    assert "Traceback" not in second.output()
    assert first.process.poll() is None
    assert connect(f"ipc://{configuration.parent}/control").join()


def test_what_a_killed_one_left_is_no_obstacle(
    configuration: Path, serve: Callable[[Path], Program], connect: Callable[..., Rank]
) -> None:
    first = serve(configuration)
    assert len(private_directories()) == 1
    first.process.kill()
    assert first.wait() == -signal.SIGKILL
    assert (configuration.parent / "control").is_socket()
    left = private_directories()
    second = serve(configuration)
    assert connect(f"ipc://{configuration.parent}/control").join()
    assert second.process.poll() is None
    # The second one has a directory of its own, and has removed that of the first.
    assert len(private_directories()) == 1
    assert not left & private_directories()


def test_what_a_living_one_has_is_left_alone(
    configuration: Path, serve: Callable[[Path], Program], short_dir: Path
) -> None:
    serve(configuration)
    before = private_directories()
    other = short_dir / "other.toml"
    other.write_text(
        configuration.read_text().replace("/control", "/control2").replace("/outcomes", "/outcomes2")
    )
    serve(other)
    assert before < private_directories()


# --- keys ------------------------------------------------------------------------------------


def test_over_tcp_only_who_has_the_right_keys_is_let_in(
    short_dir: Path, programs: Programs, connect: Callable[..., Rank]
) -> None:
    if not zmq.has("curve"):
        pytest.skip("this build of libzmq has no CURVE")
    clients = short_dir / "clients"
    clients.mkdir()
    server_file, server_secret = zmq.auth.create_certificates(short_dir, "server")
    client_file, client_secret = zmq.auth.create_certificates(clients, "client")
    os.rename(client_secret, short_dir / "client.secret")  # noqa: PTH104 - a str, as pyzmq gives it
    configuration = short_dir / "tcp.toml"
    configuration.write_text(
        f"""
        [listen]
        control = ["tcp://127.0.0.1:0"]
        outcomes = ["tcp://127.0.0.1:0"]
        [http]
        address = ""
        [security]
        server_key = "{server_secret}"
        client_keys = "{clients}"
        [shutdown]
        grace_s = 0.0
        """
    )
    os.chmod(server_secret, 0o600)  # noqa: PTH101 - as above
    program = programs.python("-m", "coordinator", "serve", "--config", str(configuration))
    (address,) = said(program, "coordinator.ready")["control"]
    server, _ = zmq.auth.load_certificate(server_file)
    public, secret = zmq.auth.load_certificate(short_dir / "client.secret")
    assert secret is not None
    stranger_public, stranger_secret = zmq.curve_keypair()
    assert not connect(address).join(0.5), "without keys"
    assert not connect(address, server=server, public=stranger_public, secret=stranger_secret).join(0.5), (
        "with keys that the coordinator does not know"
    )
    assert not connect(address, server=stranger_public, public=public, secret=secret).join(0.5), (
        "with another server's key"
    )
    rank = connect(address, server=server, public=public, secret=secret)
    assert rank.join(), "with the right keys"
    rank.offer(1)
    said(program, "handoff.opened")
    assert client_file
    program.process.terminate()
    assert rank.outcome().failure is not None
    assert program.wait() == 0
