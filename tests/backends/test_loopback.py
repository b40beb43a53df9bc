"""What is peculiar to loopback: scripted faults, its control file, and whose memory it accepts."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from backends.base import (
    BackendError,
    ConnectError,
    Grid,
    InvalidTransferError,
    Part,
    PeerDisconnectedError,
    Region,
    Status,
    TransferError,
)
from backends.loopback import LoopbackBackend
from backends.loopback_memory import Endpoint, RemoteRegion
from tests.backends.memory import PREFIX
from tests.backends.rigs import ROOT, until_done, until_terminal, whole, write_control
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import Link, Transfer
    from tests.backends.memory import SharedMemory

    MakeMemory = Callable[..., SharedMemory]

SIZE = 1 << 20
HALF = SIZE // 2


class Pair:
    """A sender and a receiver in this process."""

    def __init__(self, make_memory: MakeMemory, options: dict[str, Any]) -> None:
        self.ours, self.theirs = make_memory(SIZE), make_memory(SIZE)
        self.ours.bytes[:] = 1
        self.receiver = LoopbackBackend("peer", {})
        self.receiver.start(sends=False)
        self.receiver.register(self.theirs.region)
        self.sender = LoopbackBackend("us", options)
        self.sender.start(sends=True)
        self.sender.register(self.ours.region)

    def connect(self, peer: str = "peer") -> Link:
        return self.sender.connect(peer, self.receiver.endpoint())

    @property
    def arrived_bytes(self) -> int:
        return int(np.count_nonzero(self.theirs.bytes))


def poll_is_settled(transfer: Transfer) -> bool:
    """Ask the engine, then say whether the transfer is settled."""
    transfer.poll()
    return transfer.settled


@pytest.fixture
def make_pair(make_memory: MakeMemory) -> Iterator[Callable[..., Pair]]:
    """Make a pair with this, whose sender has the faults given."""
    pairs: list[Pair] = []

    def make(*faults: dict[str, Any], **options: object) -> Pair:
        pairs.append(Pair(make_memory, {"faults": list(faults), **options}))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.sender.close()
        pair.receiver.close()


# --- faults ------------------------------------------------------------------------------------


def test_the_nth_write_to_matching_peers_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair({"kind": "refuse", "peer": "decode-*", "nth": 2})
    link, other = pair.connect("decode-1"), pair.connect("other")
    until_done(link.write([whole(SIZE)]))
    until_done(other.write([whole(SIZE)]))
    until_done(other.write([whole(SIZE)]))
    pair.theirs.bytes[:] = 0

    with pytest.raises(TransferError, match="refuse"):
        link.write([whole(SIZE)])
    assert pair.arrived_bytes == 0
    until_done(link.write([whole(SIZE)]))


@pytest.mark.parametrize(("kind", "error"), [("fail", TransferError), ("disconnect", PeerDisconnectedError)])
def test_a_write_fails_in_the_middle(
    make_pair: Callable[..., Pair], kind: str, error: type[BackendError]
) -> None:
    pair = make_pair({"kind": kind, "after_bytes": HALF + 1})
    transfer = pair.connect().write([whole(SIZE)])

    assert transfer.poll() is Status.FAILED
    assert transfer.settled
    assert type(transfer.error) is error
    assert pair.arrived_bytes == HALF


def test_failed_and_not_settled_bytes_still_land(make_pair: Callable[..., Pair]) -> None:
    """What engines that cannot cancel do: the failure is told, and the bytes come later; case C23."""
    pair = make_pair({"kind": "fail", "after_bytes": HALF, "settle_s": 0.1})
    transfer = pair.connect().write([whole(SIZE)])
    assert transfer.poll() is Status.FAILED
    assert not transfer.settled
    assert pair.arrived_bytes == HALF
    pair.ours.bytes[:] = 2

    eventually(lambda: poll_is_settled(transfer))

    assert transfer.status is Status.FAILED
    assert np.count_nonzero(pair.theirs.bytes == 2) == HALF


def test_a_fence_settles_what_never_would(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair({"kind": "fail", "after_bytes": HALF, "settle_s": float("inf")})
    link = pair.connect()
    transfer = link.write([whole(SIZE)])
    assert not poll_is_settled(transfer)

    link.fence()

    assert poll_is_settled(transfer)
    assert isinstance(transfer.error, TransferError), "the first cause stays"
    assert pair.arrived_bytes == HALF


def test_a_write_stalls_for_a_while(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair({"kind": "stall", "after_bytes": HALF, "for_s": 0.2})
    started_s = time.monotonic()
    transfer = pair.connect().write([whole(SIZE)])
    assert transfer.status is Status.MOVING
    assert pair.arrived_bytes == HALF

    until_done(transfer)

    assert time.monotonic() - started_s >= 0.2
    assert pair.arrived_bytes == SIZE


def test_a_completion_that_never_comes(make_pair: Callable[..., Pair]) -> None:
    """All bytes are in place and nobody says so; case C01."""
    transfer = make_pair({"kind": "stall", "after_bytes": SIZE}).connect().write([whole(SIZE)])
    assert {transfer.poll() for _ in range(100)} == {Status.MOVING}


def test_a_slow_write_keeps_its_pace(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair({"kind": "slow", "bytes_per_s": SIZE * 4})
    started_s = time.monotonic()
    transfer = pair.connect().write([whole(SIZE)])
    seen = set()
    while transfer.poll() is Status.MOVING:
        seen.add(pair.arrived_bytes)

    assert transfer.status is Status.DONE
    assert time.monotonic() - started_s >= 0.25
    assert len(seen) > 5


def test_a_connect_is_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair({"kind": "refuse", "on": "connect", "nth": 1})
    with pytest.raises(ConnectError, match="refuse"):
        pair.connect()
    until_done(pair.connect().write([whole(SIZE)]))


@pytest.mark.parametrize("call", ["connect", "write"])
def test_a_call_hangs_and_other_links_do_not(make_pair: Callable[..., Pair], call: str) -> None:
    """A call that never returns holds up its own link only; case C04."""
    pair = make_pair({"kind": "hang", "peer": "lost", "on": call})
    entered = threading.Event()

    def hang() -> None:
        entered.set()
        pair.connect("lost").write([whole(SIZE)])

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    assert entered.wait(5)

    until_done(pair.connect("sound").write([whole(SIZE)]))
    thread.join(0.2)
    assert thread.is_alive()


def test_a_write_crashes_the_process(make_memory: MakeMemory, make_pair: Callable[..., Pair]) -> None:
    """As a native engine may; the bytes before the fault are in place; case C08."""
    pair, ours = make_pair(), make_memory(SIZE, seed=1)
    options = f'{{"faults": [{{"kind": "crash", "after_bytes": {HALF}}}]}}'
    arguments = [options, ours.path, str(SIZE), pair.receiver.endpoint().hex(), "closed"]
    found = subprocess.run(
        [sys.executable, "-m", "tests.backends.sender_program", "loopback", *arguments],
        cwd=ROOT,
        input=b"go\n",
        capture_output=True,
        check=False,
        timeout=20,
    )

    assert found.returncode == -signal.SIGABRT
    assert np.array_equal(pair.theirs.bytes[:HALF], ours.bytes[:HALF])
    assert not pair.theirs.bytes[HALF:].any()


def test_faults_can_be_written_in_toml(make_pair: Callable[..., Pair]) -> None:
    text = '[[faults]]\nkind = "stall"\nfor_s = inf\n[[faults]]\nkind = "fail"\nsettle_s = 2'
    make_pair(*tomllib.loads(text)["faults"])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({}, "kind"),
        ({"kind": "explode"}, "explode"),
        ({"kind": "fail", "on": "connect"}, "connect"),
        ({"kind": "fail", "nth": 0}, "nth"),
        ({"kind": "fail", "after_bytes": -1}, "after_bytes"),
        ({"kind": "stall", "for_s": 0}, "for_s"),
        ({"kind": "slow", "bytes_per_s": "fast"}, "bytes_per_s"),
        ({"kind": "fail", "afterbytes": 1}, "afterbytes"),
    ],
)
def test_impossible_faults_are_refused(fault: dict[str, Any], named: str) -> None:
    with pytest.raises(BackendError, match=named):
        LoopbackBackend("us", {"faults": [fault]})


# --- the control file --------------------------------------------------------------------------


def test_the_control_file_switches_faults_at_run_time(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    """A stall begins with the next write and ends when the file no longer asks for it."""
    control = tmp_path / "faults.toml"
    pair = make_pair(control=str(control))
    link = pair.connect()
    until_done(link.write([whole(SIZE)]))

    write_control(control, f'[[faults]]\nkind = "stall"\nafter_bytes = {HALF}\n')
    transfer = link.write([whole(SIZE)])
    assert {transfer.poll() for _ in range(10)} == {Status.MOVING}

    write_control(control, "")
    until_done(transfer)


def test_calls_are_counted_anew_for_a_new_script(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    control = tmp_path / "faults.toml"
    pair = make_pair(control=str(control))
    link = pair.connect()
    for _ in range(2):
        write_control(control, '[[faults]]\nkind = "refuse"\nnth = 2\n')
        until_done(link.write([whole(SIZE)]))
        with pytest.raises(TransferError):
            link.write([whole(SIZE)])
    control.unlink()
    for _ in range(3):
        until_done(link.write([whole(SIZE)]))


def test_a_broken_control_file_is_an_error(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    control = tmp_path / "faults.toml"
    pair = make_pair(control=str(control))
    link = pair.connect()
    write_control(control, '[[faults]]\nkind = "stal"\n')
    with pytest.raises(TransferError, match=r"faults\.toml.*stal"):
        link.write([whole(SIZE)])
    with pytest.raises(ConnectError, match=r"faults\.toml.*stal"):
        pair.connect()


def test_a_control_file_that_breaks_meanwhile_fails_no_transfer(
    make_pair: Callable[..., Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever polls is told nothing by an exception: what was read last counts."""
    control = tmp_path / "faults.toml"
    write_control(control, f'[[faults]]\nkind = "stall"\nafter_bytes = {HALF}\n')
    transfer = make_pair(control=str(control)).connect().write([whole(SIZE)])
    write_control(control, "[[faults]\n")
    assert {transfer.poll() for _ in range(10)} == {Status.MOVING}
    assert len([record for record in caplog.records if "still in force" in record.message]) == 1
    write_control(control, "")
    until_done(transfer)


# --- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [[0, 1, 2], [0, 5, 2], [0, 3, 1, 3], [2, 1, 0], [4]])
def test_blocks_that_begin_and_end_as_a_run_does_are_not_taken_for_one(
    make_pair: Callable[..., Pair], source: list[int]
) -> None:
    pair = make_pair()
    grid = Grid(0, 0, 4096, 4096, SIZE // 4096)
    ours, theirs = pair.ours.bytes.reshape(-1, 4096), pair.theirs.bytes.reshape(-1, 4096)
    ours[:] = np.arange(1, grid.count + 1, dtype=np.uint8)[:, None]
    for blocks in ([number + 8 for number in source], list(range(8, 8 + len(source)))):
        theirs[:] = 0
        expected = theirs.copy()
        for one, other in zip(source, blocks, strict=True):
            expected[other] = ours[one]
        part = Part(grid, np.array(source, np.int32), grid, np.array(blocks, np.int32))
        until_done(pair.connect().write([part]))
        assert np.array_equal(theirs, expected)


# --- whose memory ------------------------------------------------------------------------------


def test_only_a_mapping_of_the_named_file_is_registered(make_memory: MakeMemory) -> None:
    """Otherwise bytes would arrive in memory that nobody looks at."""
    one, other = make_memory(SIZE), make_memory(SIZE)
    backend = LoopbackBackend("peer", {})
    backend.start(sends=False)
    with pytest.raises(InvalidTransferError, match="not a mapping of"):
        backend.register(Region(one.region.address, SIZE, path=other.path))
    with pytest.raises(InvalidTransferError, match="names none"):
        backend.register(Region(one.region.address, SIZE))
    backend.close()


def test_a_sender_may_have_memory_of_its_own(make_pair: Callable[..., Pair]) -> None:
    """It is read from, and cannot be handed out."""
    pair = make_pair()
    private = np.full(SIZE, 7, np.uint8)
    assert pair.sender.register(Region(private.ctypes.data, SIZE)) == 1
    part = whole(SIZE)
    part = msgspec.structs.replace(part, source=replace(part.source, region=1))
    until_done(pair.connect().write([part]))
    assert (pair.theirs.bytes == 7).all()
    with pytest.raises(BackendError, match="without a file"):
        pair.sender.endpoint()


@pytest.mark.parametrize(
    "regions",
    [
        [RemoteRegion("/etc/passwd", 100)],
        [RemoteRegion("/dev/shm/../../etc/passwd", 100)],  # noqa: S108 - to be refused
        [RemoteRegion("/dev/zero", SIZE)],
        [RemoteRegion("", SIZE)],
    ],
)
def test_an_endpoint_cannot_lead_elsewhere(
    make_pair: Callable[..., Pair], regions: list[RemoteRegion]
) -> None:
    endpoint = msgspec.msgpack.encode(Endpoint("evil", tuple(regions)))
    with pytest.raises(ConnectError, match="not a file directly in"):
        make_pair().sender.connect("evil", endpoint)


def test_an_endpoint_cannot_lie_about_sizes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    endpoint = msgspec.msgpack.encode(Endpoint("evil", (RemoteRegion(pair.theirs.path, SIZE * 2),)))
    with pytest.raises(ConnectError, match="should have"):
        pair.sender.connect("evil", endpoint)


def test_an_endpoint_that_cannot_be_used_leaves_nothing_open(make_pair: Callable[..., Pair]) -> None:
    """Nor does one of which a part can: it is larger than what a process can map, or has another size."""
    pair = make_pair()
    huge = Path(PREFIX + secrets.token_hex(16))
    huge.touch(0o600)
    os.truncate(huge, 1 << 50)
    good = RemoteRegion(pair.theirs.path, SIZE)
    before = open_files()
    try:
        for bad in (RemoteRegion(str(huge), 1 << 50), RemoteRegion(pair.ours.path, SIZE + 1)):
            with pytest.raises(ConnectError, match=r"cannot be mapped|should have"):
                pair.sender.connect("evil", msgspec.msgpack.encode(Endpoint("evil", (good, bad))))
    finally:
        huge.unlink()
    assert open_files() == before


def test_memory_that_is_refused_is_not_kept_open(make_memory: MakeMemory) -> None:
    one, other = make_memory(SIZE), make_memory(SIZE)
    backend = LoopbackBackend("peer", {})
    backend.start(sends=False)
    before = open_files()
    with pytest.raises(InvalidTransferError, match="not a mapping of"):
        backend.register(Region(one.region.address, SIZE, path=other.path))
    assert open_files() == before
    backend.close()


def test_who_only_receives_cannot_connect(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    with pytest.raises(BackendError, match="sends=True"):
        pair.receiver.connect("peer", pair.receiver.endpoint())


def test_memory_that_nobody_holds_is_not_written(make_pair: Callable[..., Pair]) -> None:
    """The file is still there and its owner is gone."""
    pair = make_pair()
    endpoint, link = pair.receiver.endpoint(), pair.connect()
    pair.receiver.close()

    with pytest.raises(ConnectError, match="nobody holds"):
        pair.sender.connect("peer", endpoint)
    with pytest.raises(PeerDisconnectedError):
        link.write([whole(SIZE)])
    assert pair.arrived_bytes == 0


def test_memory_that_was_cut_short_is_not_written(make_pair: Callable[..., Pair]) -> None:
    """Writing beyond the end of a file kills the writer."""
    pair = make_pair()
    link = pair.connect()
    os.truncate(pair.theirs.path, HALF)

    with pytest.raises(PeerDisconnectedError):
        link.write([whole(SIZE)])


def test_links_give_back_what_they_took(make_pair: Callable[..., Pair]) -> None:
    """Descriptors and mappings, over many links."""
    pair = make_pair()

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(pair.theirs.path)

    before = open_files(), mappings()
    for _ in range(20):
        pair.connect().fence()
    assert (open_files(), mappings()) == before
    assert until_terminal(pair.connect().write([whole(SIZE)])) is Status.DONE
