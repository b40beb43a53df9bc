"""What is peculiar to nixl: its environment, its noise, its agents, and the hazards of its engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

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
    plain_grid,
    until_done,
    until_terminal,
    whole,
)
from tests.support.descriptors import open_files

pytest.importorskip("backends.nixl", reason="the nixl wheel is not installed", exc_type=ImportError)

from backends.nixl import NixlBackend
from backends.nixl_link import Endpoint, NixlLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend
    from tests.backends.memory import SharedMemory

    MakePeer = Callable[..., Peer]
    MakeMemory = Callable[..., SharedMemory]
    MakeSender = Callable[..., Backend]

pytestmark = pytest.mark.nixl

MIB = 1 << 20
TCP = {"transports": "tcp", "devices": "lo"}
#: Short, for some tests wait for them; long enough for a busy host, on which all stands still for a second.
BOUNDS = {"tcp_user_timeout_s": 3, "connect_timeout_s": 8}


@pytest.fixture(scope="module")
def rig() -> Rig:
    """Only nixl here, over sockets."""
    return Rig("nixl", {**TCP, **BOUNDS})


def tasks() -> int:
    """Threads of this process, native ones included."""
    return len(list(Path("/proc/self/task").iterdir()))


def changed(endpoint: bytes, **fields: Any) -> bytes:  # noqa: ANN401 - any field of an endpoint
    """The endpoint with other fields."""
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(endpoint, type=Endpoint), **fields)
    )


# --- options and environment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"transports": "tcp; rm -rf"}, "transports"),
        ({"transports": ["tcp"]}, "transports"),
        ({"devices": "eth0\nUCX_TLS=all"}, "devices"),
        ({"devices": "eth0\n"}, "devices"),
        ({"transports": "tcp\n"}, "transports"),
        ({"tcp_user_timeout_s": -1}, "tcp_user_timeout_s"),
        ({"progress_delay_us": 0}, "progress_delay_us"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"timeout": 1}, "timeout"),
        ({"threads_per_peer": -1}, "threads_per_peer"),
        ({"threads_per_peer": 17}, "threads_per_peer"),
        ({"threads_per_peer": True}, "threads_per_peer"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BackendError, match=f"nixl options: .*{named}"):
        NixlBackend("us", options)


@pytest.mark.parametrize("options", [{"devices": "nope0"}, {"transports": "nope"}])
def test_what_this_host_lacks_is_refused_at_start(options: dict[str, str]) -> None:
    """Not at the first handoff; the text names what was asked for; case C56."""
    (wanted,) = options.values()
    with pytest.raises(BackendError, match=wanted):
        NixlBackend("us", options).start(sends=True)


def test_one_process_has_one_setting() -> None:
    """The engine reads its environment once; a second setting would be ignored silently."""
    first = NixlBackend("us", TCP)
    first.start(sends=True)
    NixlBackend("also-us", TCP).start(sends=True)
    with pytest.raises(BackendError, match=r"already runs NIXL with .*lo.*; .* was asked for"):
        NixlBackend("not-us", {"transports": "tcp"}).start(sends=True)
    first.close()


GOOD_MANNERS = """
import logging, os, signal, sys
logging.basicConfig(filename=sys.argv[1], filemode="w")
def state():
    return logging.root.handlers[:], logging.raiseExceptions, signal.getsignal(signal.SIGHUP)
before = state()
from backends.registry import load
backend = load("nixl")("us", {"transports": "tcp", "devices": "lo"})
assert not [name for name in sys.modules if name.startswith("nixl")], "loaded before it was started"
backend.start(sends=False)
logging.error("still logging")
assert state() == before
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "mooncake")]
caught = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt")]
assert not int(caught[0], 16) & 1 << (signal.SIGHUP - 1), "SIGHUP is caught"
backend.close()
"""


def test_loading_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """Logging, stdout, SIGHUP: the engine and the package around it take all of these over."""
    log = tmp_path / "log"
    found = subprocess.run(
        [sys.executable, "-c", GOOD_MANNERS, str(log)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
    assert "still logging" in log.read_text()


def test_the_engine_complains_on_stderr_only() -> None:
    """What it has to say about a bad device must not land in a stream of JSON lines."""
    program = """
from backends.base import BackendError
from backends.registry import load
try:
    load("nixl")("us", {"devices": "nope0"}).start(sends=True)
except BackendError:
    print("refused")
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert found.stdout == "refused\n"
    assert "UCX" in found.stderr


# --- endpoints ---------------------------------------------------------------------------------


def test_damaged_metadata_never_reaches_the_engine(peer: Peer, make_sender: MakeSender) -> None:
    """Native code parses it, and would crash on some of these."""
    backend = make_sender()
    metadata = msgspec.msgpack.decode(peer.endpoint, type=Endpoint).metadata
    for position in range(0, len(metadata), 16):
        damaged = metadata[:position] + bytes([metadata[position] ^ 0x55]) + metadata[position + 1 :]
        with pytest.raises(ConnectError, match="damaged"):
            backend.connect("peer", changed(peer.endpoint, metadata=damaged))


def test_nonsense_with_a_right_checksum_is_refused(peer: Peer, make_sender: MakeSender) -> None:
    backend = make_sender()
    for metadata in (b"", b"nonsense", b"nixlSerDes|" + b"\xff" * 100):
        with pytest.raises(ConnectError, match="cannot be reached"):
            backend.connect(
                "peer", changed(peer.endpoint, metadata=metadata, metadata_crc=zlib.crc32(metadata))
            )


def test_an_address_that_cannot_be_is_refused(peer: Peer, make_sender: MakeSender) -> None:
    """The engine counts from it, and a sum that no pointer holds would end the worker."""
    first, *_ = msgspec.msgpack.decode(peer.endpoint, type=Endpoint).regions
    impossible = msgspec.structs.replace(first, address=2**64 - 1)
    backend = make_sender()
    for changes in ({"regions": (impossible,)}, {"probe": impossible}):
        with pytest.raises(ConnectError, match="is not one of nixl"):
            backend.connect("peer", changed(peer.endpoint, **changes))


def test_memory_that_the_peer_did_not_register_is_not_written(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """An endpoint that names more than its metadata covers."""
    ours = make_memory(MIB, seed=1)
    first, second = msgspec.msgpack.decode(peer.endpoint, type=Endpoint).regions
    lies = [
        msgspec.structs.replace(first, address=first.address + first.size_bytes),
        msgspec.structs.replace(first, address=first.address + first.size_bytes - MIB // 2),
        msgspec.structs.replace(first, address=4096),
        msgspec.structs.replace(first, address=first.address - MIB),
    ]
    # The kernel may have put the other region right beside it: what lies there is registered.
    lies = [lie for lie in lies if abs(lie.address - second.address) >= max(MIB, second.size_bytes)]
    assert len(lies) > 1
    backend = make_sender(ours)
    for lie in lies:
        link = backend.connect("peer", changed(peer.endpoint, regions=(lie, second)))
        with pytest.raises(TransferError):
            link.write([whole(MIB)])
        until_done(link.write([msgspec.structs.replace(whole(MIB), destination=plain_grid(MIB, region=1))]))
    assert not peer.memory[0].bytes.any()


# --- peers -------------------------------------------------------------------------------------


def test_a_stopped_peer_cannot_be_connected(make_peer: MakePeer, make_sender: MakeSender) -> None:
    """Its kernel still accepts; only an answer of its engine counts; case C15."""
    peer, backend = make_peer(MIB), make_sender()
    peer.stop()
    with pytest.raises(ConnectError, match="did not answer within 8 s"):
        backend.connect("peer", peer.endpoint)
    peer.go_on()
    backend.connect("peer", peer.endpoint)


def test_a_peer_that_stays_stopped_is_lost(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """``tcp_user_timeout_s`` bounds it; the kernel alone would take many minutes."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        started_s = time.monotonic()
        assert until_terminal(transfer) is Status.FAILED
        assert time.monotonic() - started_s < 2 * 3 + SLACK_S
        assert isinstance(transfer.error, PeerDisconnectedError)
        assert transfer.settled


def test_a_link_that_could_not_be_fenced_can_be_later(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """What told of it does not hold the engine."""
    link = make_sender(make_memory(MIB)).connect("peer", peer.endpoint)
    assert isinstance(link, NixlLink)
    held = link._agent._native
    with pytest.raises(BackendError, match="1 others hold it") as told:
        link.fence()
    del held
    link.fence()
    assert link.fenced, told


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


def test_a_lost_link_quiets_itself(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """One transfer is polled; the others settle with it, and a poll of theirs does no harm."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        others = [link.write([whole(MIB)]) for _ in range(3)]
        peer.kill()
        assert until_terminal(transfer) is Status.FAILED
        assert all(other.settled for other in others)
        assert {other.poll() for other in others} == {Status.FAILED}


# --- resources ---------------------------------------------------------------------------------


def test_links_give_back_what_they_took(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Descriptors, threads and memory, over many links that were fenced with a write under way."""
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES)
    backend = make_sender(ours)

    # Scattered, so that the engine has much to remember about each write.
    part = whole(LARGE_BYTES)
    part = msgspec.structs.replace(part, destination_blocks=part.destination_blocks[::-1])

    def cycle() -> None:
        link = backend.connect("peer", peer.endpoint)
        link.write([part])
        link.fence()

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    for _ in range(3):
        cycle()
    before = open_files(), tasks()
    grown_bytes = []
    # What leaks does so in every round; what an allocator keeps for later, or another thread takes, in one.
    for _ in range(3):
        before_bytes = resident_bytes()
        for _ in range(10):
            cycle()
        grown_bytes.append(resident_bytes() - before_bytes)
    assert (open_files(), tasks()) == before
    assert min(grown_bytes) < 4 * MIB, grown_bytes


def test_many_grids_are_not_kept_for_ever(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    ours = make_memory(MIB, seed=1)
    link = make_sender(ours).connect("peer", peer.endpoint)
    one = np.zeros(1, np.int32)
    for block in range(200):
        grid = replace(plain_grid(BLOCK_BYTES), offset_bytes=block * BLOCK_BYTES)
        until_done(link.write([Part(grid, one, grid, one)]))
    assert np.array_equal(peer.memory[0].bytes[: 200 * BLOCK_BYTES], ours.bytes[: 200 * BLOCK_BYTES])
    assert link._agent.prepared_count < 200  # type: ignore[attr-defined]


def test_an_idle_link_does_nothing(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """No thread of the engine's runs for it; case C50."""
    ours = make_memory(MIB)
    backend = make_sender(ours)
    backend.connect("peer", peer.endpoint)
    before = tasks()
    for number in range(3):
        until_done(backend.connect(f"peer-{number}", peer.endpoint).write([whole(MIB)]))
    assert tasks() == before
