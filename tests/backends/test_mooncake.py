"""What is peculiar to mooncake: its environment, its ids, its engines, and who is at the other end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import pytest

from backends import mooncake_engine
from backends.base import BackendError, ConnectError, Part, PeerDisconnectedError, Status, TransferError
from tests.backends.rigs import (
    BLOCK_BYTES,
    LARGE_BYTES,
    PATIENCE_S,
    ROOT,
    SLACK_S,
    Peer,
    Rig,
    held_up,
    needs_nixl,
    plain_grid,
    until_done,
    until_terminal,
    whole,
)
from tests.support.waiting import eventually

pytest.importorskip("backends.mooncake", reason="the mooncake wheel is not installed", exc_type=ImportError)

from backends.mooncake import MooncakeBackend
from backends.mooncake_connections import DEPTH_BYTES, ENGINES
from backends.mooncake_endpoint import decode
from backends.mooncake_engine import LANES, Engine, EngineSettings, load_engine
from backends.mooncake_link import MooncakeLink
from backends.mooncake_warmup import WarmUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from backends.base import Backend
    from tests.backends.memory import SharedMemory

    MakePeer = Callable[..., Peer]
    MakeMemory = Callable[..., SharedMemory]
    MakeSender = Callable[..., Backend]

pytestmark = pytest.mark.mooncake

MIB = 1 << 20
#: Short, for some tests wait for them; long enough for a busy host, on which all stands still for a second,
#: or it takes some to make all connections.
OPTIONS = {"peer_timeout_s": 3, "connect_timeout_s": 8}
UNANSWERED = "did not answer within 8 s"
#: Of a link to a peer with the default number of engines.
CONNECTIONS = ENGINES * 4 * LANES


@pytest.fixture(scope="module")
def rig() -> Rig:
    """Only mooncake here."""
    return Rig("mooncake", OPTIONS)


def every_other(size_bytes: int, blocks: int | None = None) -> Part:
    """The first, third, fifth and so on of that many bytes: pieces that cannot be merged.

    ``blocks`` says how many; ``None``: all of them.
    """
    grid = plain_grid(size_bytes)
    numbers = np.arange(grid.count, dtype=np.int32)[::2][:blocks]
    return Part(grid, numbers, grid, numbers)


def linked(backend: Backend, peer: Peer) -> MooncakeLink:
    """A link, of which the engines are looked at."""
    link = backend.connect("peer", peer.endpoint)
    assert isinstance(link, MooncakeLink)
    return link


def changed(endpoint: bytes, **fields: Any) -> bytes:  # noqa: ANN401 - any field of an endpoint
    """The endpoint with other fields."""
    return msgspec.msgpack.encode(msgspec.structs.replace(decode("peer", endpoint), **fields))


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


# --- options and environment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host": "localhost"}, "host"),
        ({"host": "::1"}, "host"),
        ({"host": "127.0.0.1:15000"}, "host"),
        ({"host": "0.0.0.0"}, "host"),  # noqa: S104 - refused
        ({"host": "224.0.0.1"}, "host"),
        ({"receivers": 0}, "receivers"),
        ({"receivers": 17}, "receivers"),
        ({"protocol": "udp"}, "protocol"),
        ({"protocol": "etcd"}, "protocol"),
        ({"protocol": "rdma", "device": "mlx5_0; rm"}, "device"),
        ({"protocol": "rdma", "device": "mlx5_0\n"}, "device"),
        ({"device": "mlx5_0"}, "device"),
        ({"peer_timeout_s": 0}, "peer_timeout_s"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"timeout": 1}, "timeout"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: str) -> None:
    """An unknown scheme would abort the process."""
    with pytest.raises(BackendError, match=f"mooncake options: .*{named}"):
        MooncakeBackend("us", options)


@pytest.mark.parametrize("sends", [True, False])
def test_a_host_that_is_not_ours_is_refused_at_start(sends: bool) -> None:  # noqa: FBT001 - a parameter
    """Not at the first handoff; case C56."""
    with pytest.raises(BackendError, match=r"203\.0\.113\.7.* no address of this host"):
        MooncakeBackend("us", {"host": "203.0.113.7"}).start(sends=sends)


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this host has RDMA devices")
def test_rdma_without_a_device_is_refused_at_start() -> None:
    with pytest.raises(BackendError, match="no RDMA device"):
        MooncakeBackend("us", {"protocol": "rdma"}).start(sends=True)


@pytest.mark.parametrize(
    "name",
    ["MC_TCP_PROTO", "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "MC_DISABLE_METACACHE", "MC_LOG_DIR"],
)
def test_variables_that_take_safety_away_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(BackendError, match=f"{name} must not be set: "):
        MooncakeBackend("us", {}).start(sends=True)


def test_one_process_has_one_setting() -> None:
    first = MooncakeBackend("us", {})
    first.start(sends=True)
    MooncakeBackend("also-us", {}).start(sends=True)
    with pytest.raises(BackendError, match=r"already runs Mooncake with .*'15'.* was asked for"):
        MooncakeBackend("not-us", {"peer_timeout_s": 7}).start(sends=True)
    first.close()


GOOD_MANNERS = """
import logging, signal, sys
logging.basicConfig(filename=sys.argv[1], filemode="w")
def state():
    return logging.root.handlers[:], logging.raiseExceptions, signal.getsignal(signal.SIGINT)
before = state()
from backends.registry import load
backend = load("mooncake")("us", {})
assert not [name for name in sys.modules if name.startswith("mooncake")], "loaded before it was started"
backend.start(sends=False)
backend.endpoint()
logging.error("still logging")
assert state() == before
loaded = [name for name in sys.modules if name.partition(".")[0] in ("mooncake", "nixl_cu12", "torch")]
assert loaded == ["mooncake.engine"], loaded
backend.close()
"""


def test_loading_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """Its messages go to stderr; stdout, logging and signals stay ours."""
    found = run(GOOD_MANNERS, str(tmp_path / "log"))
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
    assert "still logging" in (tmp_path / "log").read_text()


BOTH = """
import sys
from backends.registry import load
options = {"nixl": {"transports": "tcp", "devices": "lo"}, "mooncake": {}}
backends = [load(name)("us", options[name]) for name in sys.argv[1:3]]
for backend in backends:
    backend.start(sends=False)
    backend.endpoint()
if sys.argv[3] == "closed":
    for backend in backends:
        backend.close()
"""


@pytest.mark.parametrize(
    "first", [pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_nixl)]
)
def test_both_engines_in_one_process(first: str) -> None:
    """In either order, and the process ends in good order."""
    second = "mooncake" if first == "nixl" else "nixl"
    for how in ("closed", "not closed"):
        found = run(BOTH, first, second, how)
        assert (found.returncode, found.stdout) == (0, ""), found.stderr


@pytest.mark.parametrize("version", ["0.3.9.post2", "0.3.13", "0.3.14"])
def test_an_engine_of_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones say that a write is done before it is in place; new ones connect again before a write."""
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    monkeypatch.setattr("backends.mooncake_engine.metadata.version", lambda _: version)
    with pytest.raises(BackendError, match=f"{version} was not shown to be safe; install 0.3.13.post1"):
        MooncakeBackend("us", {}).start(sends=True)


# --- ids ---------------------------------------------------------------------------------------


class Watched:
    """What links do with the ids of their engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every engine."""
        self.sizes_bytes: list[int] = []
        # Pieces that each engine had at a time, at most.
        self.most: Counter[Engine] = Counter()
        self.most_bytes = 0
        self.wrong: list[str] = []
        self._moving: dict[Engine, dict[int, int]] = {}
        submit, submit_read, ended = Engine.submit, Engine.submit_read, Engine.ended

        def watched_submit(engine: Engine, name: str, source: int, destination: int, size_bytes: int) -> int:
            number = submit(engine, name, source, destination, size_bytes)
            moving = self._moving.setdefault(engine, {})
            moving[number] = size_bytes
            self.most[engine] = max(self.most[engine], len(moving))
            under_way = sum(sum(pieces.values()) for pieces in self._moving.values())
            self.most_bytes = max(self.most_bytes, under_way)
            self.sizes_bytes.append(size_bytes)
            return number

        def watched_read(engine: Engine, name: str, destination: int, source: int, size_bytes: int) -> int:
            number = submit_read(engine, name, destination, source, size_bytes)
            self._moving.setdefault(engine, {})[number] = size_bytes
            return number

        def watched_ended(engine: Engine, numbers: Iterable[int]) -> list[tuple[int, bool]]:
            asked = set(numbers)
            moving = self._moving.setdefault(engine, {})
            self.wrong += [f"asked after {number}, which has ended" for number in asked - moving.keys()]
            ends = ended(engine, asked & moving.keys())
            for number, _ in ends:
                del moving[number]
            return ends

        monkeypatch.setattr(Engine, "submit", watched_submit)
        monkeypatch.setattr(Engine, "submit_read", watched_read)
        monkeypatch.setattr(Engine, "ended", watched_ended)

    @property
    def unended(self) -> int:
        """Ids that nobody has seen the end of."""
        return sum(len(moving) for moving in self._moving.values())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_ids_are_few_and_asked_after_until_their_end_and_never_again(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender, watched: Watched
) -> None:
    """To ask once more reads freed memory; above some 2,000 the engine breaks its word."""
    link = make_sender(make_memory(2 * MIB, seed=1)).connect("peer", peer.endpoint)
    transfers = [link.write([every_other(2 * MIB)]) for _ in range(4)]
    for transfer in transfers:
        until_done(transfer)
        transfer.poll()
    assert not watched.wrong
    assert list(watched.most.values()) == [CONNECTIONS // ENGINES] * ENGINES
    assert watched.unended == 0
    assert len(watched.sizes_bytes) == 4 * 256


def test_what_a_fence_may_find_under_way_is_bounded_in_bytes(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender, watched: Watched
) -> None:
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    for _ in range(2):
        until_done(link.write([whole(LARGE_BYTES)]))
    assert DEPTH_BYTES // 2 < watched.most_bytes < DEPTH_BYTES + max(watched.sizes_bytes)


def test_a_busy_engine_says_so(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Whoever asks meanwhile takes a core from its connections; its last pieces are asked after at once."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        assert transfer.rest_s > 0
    until_done(transfer)
    small = link.write([whole(MIB)])
    assert small.rest_s == 0
    until_done(small)


def test_the_pieces_of_several_writes_take_turns_and_each_is_told(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """A write behind a large one must not look as if it stood still."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES, seed=1)).connect("peer", peer.endpoint)
    all_of_them = every_other(LARGE_BYTES)
    large, small = (link.write([part]) for part in (all_of_them, every_other(LARGE_BYTES, 8)))
    until_done(small)
    assert small.progress == 8
    assert large.status is Status.MOVING
    assert 0 < large.progress < all_of_them.count
    until_done(large)
    assert large.progress == all_of_them.count


def test_runs_are_merged_and_long_ones_cut(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender, watched: Watched
) -> None:
    link = make_sender(make_memory(11 * MIB, seed=1)).connect("peer", peer.endpoint)
    watched.sizes_bytes.clear()
    part = whole(10 * MIB + MIB // 2)
    until_done(link.write([part]))
    assert watched.sizes_bytes == [MIB] * 10 + [MIB // 2]


def test_a_failed_write_is_followed_to_its_end(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender, watched: Watched
) -> None:
    """Memory that the peer did not register: it says no, for that write alone; case C11."""
    ours = make_memory(MIB, seed=1)
    first, second = decode("peer", peer.endpoint).regions
    lie = msgspec.structs.replace(first, address=second.address + second.size_bytes - MIB // 2)
    link = make_sender(ours).connect("peer", changed(peer.endpoint, regions=(lie, second)))
    lying, honest = whole(MIB), msgspec.structs.replace(whole(MIB), destination=plain_grid(MIB, region=1))
    for _ in range(2):
        bad, good = link.write([lying]), link.write([honest])
        assert until_terminal(bad) is Status.FAILED
        assert isinstance(bad.error, TransferError)
        until_done(good)
        assert bad.settled
    assert not watched.wrong
    assert watched.unended == 0
    assert np.array_equal(peer.memory[1].bytes[:MIB], ours.bytes)
    assert not peer.memory[0].bytes.any()


# --- who is at the other end -------------------------------------------------------------------


def test_an_endpoint_with_an_impossible_host_is_refused(peer: Peer, make_sender: MakeSender) -> None:
    """The engine would look any name up, and write to whoever has it."""
    backend = make_sender()
    fields = msgspec.to_builtins(decode("peer", peer.endpoint))
    for host in ("localhost", "", "127.0.0.1:1", "256.0.0.1", "nonsense"):
        endpoint = msgspec.msgpack.encode([*fields[:3], host, *fields[4:]])
        with pytest.raises(ConnectError, match="not one of mooncake"):
            backend.connect("peer", endpoint)


def test_another_incarnation_is_not_connected(peer: Peer, make_sender: MakeSender) -> None:
    """All the rest of the endpoint is right."""
    with pytest.raises(ConnectError, match="is another incarnation"):
        make_sender().connect("peer", changed(peer.endpoint, incarnation=bytes(16)))


def test_a_stopped_peer_cannot_be_connected(make_peer: MakePeer, make_sender: MakeSender) -> None:
    """Its kernel still accepts; only an answer counts. The engine alone would wait for a minute; case C15."""
    peer, backend = make_peer(MIB), make_sender()
    peer.stop()
    with pytest.raises(ConnectError, match=UNANSWERED):
        backend.connect("peer", peer.endpoint)
    peer.go_on()
    backend.connect("peer", peer.endpoint)


def test_an_engine_that_does_not_answer_is_not_waited_for(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """The call takes a minute by itself; another link goes on meanwhile; case C26."""
    backend = make_sender(make_memory(MIB, seed=1))
    link = backend.connect("peer", peer.endpoint)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        theirs = decode("peer", peer.endpoint).engines[0]
        silent = msgspec.structs.replace(theirs, port=mute.getsockname()[1])
        endpoint = changed(peer.endpoint, engines=(silent,))
        with ThreadPoolExecutor() as threads:
            started_s = time.monotonic()
            connecting = threads.submit(backend.connect, "peer-again", endpoint)
            until_done(link.write([whole(MIB)]))
            assert not connecting.done()
            with pytest.raises(ConnectError, match=UNANSWERED):
                connecting.result()
            assert time.monotonic() - started_s < PATIENCE_S
        mute.accept()[0].close()


def test_a_peer_that_stays_stopped_is_lost(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """``peer_timeout_s`` bounds it, and how long the peer may take to say that it is there."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        started_s = time.monotonic()
        assert until_terminal(transfer) is Status.FAILED
        assert time.monotonic() - started_s < 3 + 8 + SLACK_S
        assert isinstance(transfer.error, PeerDisconnectedError)
        assert transfer.settled


def test_a_peer_that_closes_is_lost_at_once(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    peer = make_peer(MIB)
    link = make_sender(make_memory(MIB)).connect("peer", peer.endpoint)
    assert peer.close() == 0
    with pytest.raises(PeerDisconnectedError):
        link.write([whole(MIB)])


def connections_to(endpoint: bytes) -> set[tuple[int, int]]:
    """This process's connections to the engines of a peer, by the ports of their two ends."""
    theirs = {engine.data_port for engine in decode("peer", endpoint).engines}
    return {
        (connection.laddr.port, connection.raddr.port)
        for connection in psutil.Process().net_connections("tcp")
        # Of a socket that is not connected it is an empty tuple.
        if getattr(connection.raddr, "port", 0) in theirs
    }


@pytest.mark.parametrize(("when", "said"), [("stopped", UNANSWERED), ("killed", "connection")])
def test_a_peer_that_is_gone_when_all_is_made_is_not_connected(
    when: str, said: str, make_peer: MakePeer, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could have been another process already to which the last connections were made; case C07."""
    peer = make_peer(MIB)

    wait = WarmUp.wait

    def and_then(warm_up: WarmUp, timeout_s: float) -> None:
        wait(warm_up, timeout_s)
        peer.stop() if when == "stopped" else peer.kill()

    monkeypatch.setattr(WarmUp, "wait", and_then)
    with pytest.raises(ConnectError, match=said):
        make_sender().connect("peer", peer.endpoint)


def test_connections_that_cannot_be_found_are_told(peer: Peer, make_sender: MakeSender) -> None:
    """A link without the proof that all are there would not be safe."""
    theirs = tuple(
        msgspec.structs.replace(engine, data_port=1) for engine in decode("peer", peer.endpoint).engines
    )
    with pytest.raises(ConnectError, match=f"within 8 s .0 of {CONNECTIONS} connections are made"):
        make_sender().connect("peer", changed(peer.endpoint, engines=theirs))


@pytest.mark.parametrize("receivers", [1, 4])
def test_all_connections_are_made_before_anything_is_written(
    receivers: int, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """The engine makes one when it needs it first; and of a number that it does not like, it takes four."""
    rig = Rig("mooncake", {**OPTIONS, "receivers": receivers})
    peer = Peer(rig, 2 * MIB)
    try:
        link = make_sender(make_memory(2 * MIB)).connect("peer", peer.endpoint)
        made = connections_to(peer.endpoint)
        assert Counter(port for _, port in made) == {
            engine.data_port: ENGINES * LANES for engine in decode("peer", peer.endpoint).engines
        }
        assert len(made) == ENGINES * LANES * receivers
        until_done(link.write([every_other(2 * MIB)]))
        assert connections_to(peer.endpoint) == made
    finally:
        peer.close()


def test_a_connection_that_has_failed_is_not_made_again(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Whoever has the peer's port by then would get what was meant for the peer; case C07.

    A stopped peer's kernel takes every new connection, so that one would be seen.
    """
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    made = connections_to(peer.endpoint)
    peer.stop()
    # Many small pieces, and none of them can end: there is always one more to post.
    transfer = link.write([every_other(LARGE_BYTES)])
    # Nobody looks while the connections run into their time-out, one after the other, or all at once.
    eventually(lambda: not made & connections_to(peer.endpoint), PATIENCE_S, "all connections have failed")
    assert not connections_to(peer.endpoint)
    eventually(
        lambda: bool(connections_to(peer.endpoint)) or transfer.poll() is not Status.MOVING,
        PATIENCE_S,
        "the link is over",
    )
    assert not connections_to(peer.endpoint)
    assert isinstance(transfer.error, PeerDisconnectedError)
    assert transfer.settled


def test_a_link_with_few_connections_left_is_over(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """None is made again, so it is the link that has to be made anew."""
    peer = make_peer(LARGE_BYTES)
    lie = msgspec.structs.replace(decode("peer", peer.endpoint).regions[0], address=1 << 40)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", changed(peer.endpoint, regions=(lie,)))

    def fail(pieces: int) -> None:
        transfer = link.write([every_other(LARGE_BYTES, pieces)])
        assert until_terminal(transfer) is Status.FAILED
        assert isinstance(transfer.error, TransferError)
        eventually(lambda: (transfer.poll(), transfer.settled)[1], PATIENCE_S, "it has settled")

    fail(CONNECTIONS // 2)
    fail(1)
    with pytest.raises(
        PeerDisconnectedError, match=f"only {CONNECTIONS // 2 - 1} of its connections are left; connect anew"
    ):
        fail(1)


def test_a_refused_write_leaves_its_neighbours_alone(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """It costs three quarters of the connections here; what moves ends on those that are left; case C11."""
    peer, ours = make_peer(LARGE_BYTES, MIB), make_memory(LARGE_BYTES, seed=1)
    large, small = decode("peer", peer.endpoint).regions
    lie = msgspec.structs.replace(small, size_bytes=LARGE_BYTES, address=1 << 40)
    link = make_sender(ours).connect("peer", changed(peer.endpoint, regions=(large, lie)))
    few = every_other(LARGE_BYTES, CONNECTIONS - CONNECTIONS // 4)
    peer.stop()
    # All of these are with the engines, and then what is left of their connections has one of those.
    bad = link.write([msgspec.structs.replace(few, destination=plain_grid(LARGE_BYTES, region=1))])
    good = link.write([every_other(LARGE_BYTES)])
    peer.go_on()
    assert until_terminal(bad) is Status.FAILED
    assert isinstance(bad.error, TransferError)
    until_done(good)
    assert np.array_equal(
        peer.memory[0].bytes.reshape(-1, BLOCK_BYTES)[::2], ours.bytes.reshape(-1, BLOCK_BYTES)[::2]
    )


def test_a_write_just_after_a_look_goes_to_nobody_else(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer dies, and others have all of its ports, between the look and the write; case C07.

    Here it rests on the engine alone: it takes connections that are free, and looks at none of them.
    """
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    until_done(link.write([every_other(LARGE_BYTES)]))
    monkeypatch.setattr(MooncakeLink, "_look", lambda _: None)
    peer.kill()
    with ExitStack() as stack:
        others = [
            stack.enter_context(socket.create_server(("127.0.0.1", engine.data_port)))
            for engine in decode("peer", peer.endpoint).engines
        ]
        transfer = link.write([every_other(LARGE_BYTES)])
        assert until_terminal(transfer) is Status.FAILED
        assert isinstance(transfer.error, PeerDisconnectedError)
        for other in others:
            other.settimeout(0)
            with pytest.raises(BlockingIOError):
                other.accept()


def test_nothing_is_posted_to_whoever_has_the_port_next(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """We are that process; the sender looks neither when the peer dies nor when we are there; case C07.

    The engine alone does post to us, which shows that it would be seen.
    """
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES)
    backend = make_sender(ours)
    link = backend.connect("peer", peer.endpoint)
    bare, elsewhere = bare_engine(), decode("peer", peer.endpoint)
    bare.register(ours.region)
    theirs = elsewhere.engines[0]
    arguments = (elsewhere.name(theirs), ours.region.address, elsewhere.regions[0].address, BLOCK_BYTES)
    assert end_of(bare, bare.submit(*arguments))
    peer.stop()
    transfers = [link.write([whole(LARGE_BYTES)]) for _ in range(2)]
    peer.kill()
    with socket.create_server(("127.0.0.1", theirs.data_port)) as next_one:
        next_one.settimeout(PATIENCE_S)
        # This one fails with the connection that has died; the next one makes a new connection.
        assert not end_of(bare, bare.submit(*arguments))
        number = bare.submit(*arguments)
        with next_one.accept()[0] as caller:
            assert elsewhere.regions[0].address.to_bytes(8, "little") in caller.recv(64)
        assert not end_of(bare, number)
        bare.destroy()

        with pytest.raises(PeerDisconnectedError):
            link.write([whole(LARGE_BYTES)])
        for transfer in transfers:
            assert transfer.poll() is Status.FAILED
            assert isinstance(transfer.error, PeerDisconnectedError)
            assert transfer.settled
        next_one.settimeout(0)
        with pytest.raises(BlockingIOError):
            next_one.accept()


def bare_engine() -> Engine:
    """An engine that nobody watches over."""
    return Engine(EngineSettings(load_engine(mooncake_engine._environment or {}), "127.0.0.1", "tcp", ""))


def end_of(engine: Engine, number: int) -> bool:
    """Wait for the end of a write; whether it is done."""
    end: list[bool] = []

    def ended() -> bool:
        end.extend(done for _, done in engine.ended([number]))
        return bool(end)

    eventually(ended, PATIENCE_S, "the write ends")
    return end[0]


def test_an_engine_that_is_destroyed_is_not_called(make_memory: MakeMemory) -> None:
    """It would crash the process."""
    engine = bare_engine()
    engine.destroy()
    engine.destroy()
    for call in (
        lambda: engine.submit("127.0.0.1:1", 1, 1, 1),
        lambda: engine.submit_read("127.0.0.1:1", 1, 1, 1),
        lambda: engine.ended([1]),
        lambda: engine.probe("127.0.0.1:1"),
        lambda: engine.register(make_memory(MIB).region),
    ):
        with pytest.raises(BackendError, match="destroyed"):
            call()


def test_an_engine_that_was_held_is_destroyed_later() -> None:
    """What told of it does not hold it."""
    engine = bare_engine()
    held = engine._native
    with pytest.raises(BackendError, match="1 others hold it") as told:
        engine.destroy()
    del held
    engine.destroy()
    assert engine._native is None, told


# --- fences ------------------------------------------------------------------------------------


def test_without_a_fence_new_bytes_do_land(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """The hazard that fences are there for, and the proof that their test can fail; case C23."""
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES)
    ours.bytes[:] = 1
    link = make_sender(ours).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        ours.bytes[:] = 0xFF
    until_done(transfer)
    assert (peer.memory[0].bytes == 0xFF).any()


def test_fences_are_short(make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """The interpreter stands still meanwhile, for all links; left to itself the engine takes a second."""
    peer = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES))
    links = [backend.connect(f"peer-{number}", peer.endpoint) for number in range(4)]
    peer.stop()
    for link in links:
        link.write([whole(LARGE_BYTES)])
    durations_s = []
    for link in links:
        started_s = time.monotonic()
        link.fence()
        durations_s.append(time.monotonic() - started_s)
    assert max(durations_s) < 0.5
    peer.go_on()


def test_a_fence_destroys_all_that_it_can(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """And says when that was not all; the next one goes on."""
    link = linked(make_sender(make_memory(MIB)), peer)
    first, second = link._connections._pieces
    held = first._native
    with pytest.raises(BackendError, match="1 others hold it"):
        link.fence()
    assert (first._native, second._native) == (held, None)
    del held
    link.fence()
    assert (first._native, link.fenced) == (None, True)


def test_a_link_that_cannot_be_fenced_posts_nothing_and_settles_later(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender, caplog: pytest.LogCaptureFixture
) -> None:
    """Every poll tries again, and says nothing more of it."""
    peer = make_peer(LARGE_BYTES)
    link = linked(make_sender(make_memory(LARGE_BYTES)), peer)
    transfer = link.write([whole(LARGE_BYTES)])
    held = next(iter(link._connections._pieces))._native
    peer.kill()
    for _ in range(3):
        transfer.poll()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the link to peer is dead and cannot be fenced"
    ]
    assert (transfer.status, transfer.settled) == (Status.MOVING, False)
    with pytest.raises(PeerDisconnectedError, match=r"over: it(s|) .*connection"):
        link.write([whole(MIB)])
    del held
    assert transfer.poll() is Status.FAILED
    assert transfer.settled
    assert link.fenced


def test_a_link_that_could_not_be_fenced_is_fenced_by_the_next_poll(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Though its peer is there, and nothing of it ends."""
    peer = make_peer(LARGE_BYTES)
    link = linked(make_sender(make_memory(LARGE_BYTES)), peer)
    peer.stop()
    transfer = link.write([whole(LARGE_BYTES)])
    held = [engine._native for engine in link._connections._pieces]
    with pytest.raises(BackendError, match=r"1 others hold it; .* 1 others hold it"):
        link.fence()
    assert transfer.poll() is Status.MOVING
    held.clear()
    assert transfer.poll() is Status.FAILED
    assert "was fenced" in str(transfer.error)
    assert transfer.settled
    peer.go_on()


@pytest.mark.parametrize("which", range(ENGINES))
def test_an_engine_that_does_not_know_what_became_of_a_write_ends_the_link(
    which: int, peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """It is destroyed, though what it said has passed through here."""

    class Ignorant:
        def __init__(self, native: object) -> None:
            self._native = native

        def __getattr__(self, name: str) -> object:
            return getattr(self._native, name)

        def transfer_check_status(self, number: int) -> int:
            message = f"no {number}"
            raise RuntimeError(message)

    link = linked(make_sender(make_memory(MIB)), peer)
    engine = list(link._connections._pieces)[which]
    engine._native = Ignorant(engine._native)
    transfer = link.write([every_other(MIB)])
    assert until_terminal(transfer) is Status.FAILED
    assert isinstance(transfer.error, PeerDisconnectedError)
    assert "cannot say what became of a write: no " in str(transfer.error)
    assert transfer.settled
    assert link.fenced


def test_links_give_back_what_they_took(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Descriptors, threads and memory, over many links that were fenced with a write under way."""
    peer = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES))
    process = psutil.Process()

    def cycle() -> None:
        link = backend.connect("peer", peer.endpoint)
        link.write([whole(LARGE_BYTES)])
        link.fence()

    for _ in range(3):
        cycle()
    descriptors, threads = process.num_fds(), process.num_threads()
    grown_bytes = []
    # What leaks does so in every round; what an allocator keeps for later, or another thread takes, in one.
    for _ in range(3):
        before_bytes = process.memory_info().rss
        for _ in range(10):
            cycle()
        grown_bytes.append(process.memory_info().rss - before_bytes)
    # A thread of the last link may still have been on its way out when they were counted first.
    assert process.num_fds() <= descriptors
    assert process.num_threads() <= threads
    assert min(grown_bytes) < 4 * MIB, grown_bytes


def test_an_idle_link_does_next_to_nothing(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Its engine has threads, but they sleep; case C50."""
    backend = make_sender(make_memory(MIB))
    for number in range(4):
        until_done(backend.connect(f"peer-{number}", peer.endpoint).write([whole(MIB)]))
    shares = []
    for _ in range(5):
        before_s, started_s = time.process_time(), time.monotonic()
        # What is measured is the CPU time of an interval, so it has to pass.
        time.sleep(0.5)
        shares.append((time.process_time() - before_s) / (time.monotonic() - started_s))
    # Who polls does so in every interval; what else this process has to do now and then, it does not.
    assert min(shares) < 0.02, shares
