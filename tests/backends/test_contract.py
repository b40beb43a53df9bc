"""The contract of ``backends.base``, on every backend. See ``rigs`` for running it on your own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

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
from tests.backends.rigs import (
    BLOCK_BYTES,
    LARGE_BYTES,
    PATIENCE_S,
    ROOT,
    held_up,
    needs_mooncake,
    needs_nixl,
    plain_grid,
    until_done,
    until_terminal,
    whole,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from backends.base import Backend, Link, Transfer
    from tests.backends.memory import SharedMemory
    from tests.backends.rigs import Peer, Rig

    MakePeer = Callable[..., Peer]
    MakeMemory = Callable[..., SharedMemory]
    MakeSender = Callable[..., Backend]

MIB = 1 << 20
MARKS = {"mooncake": needs_mooncake, "nixl": needs_nixl, "nixl-threads": needs_nixl}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run everything here on each backend."""
    if "rig" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backend", default=[]) or ["loopback", *MARKS]
        parameters = [pytest.param(name, marks=MARKS.get(name, ())) for name in names]
        metafunc.parametrize("rig", parameters, indirect=True, scope="module")


def blocks(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


# --- moving bytes ------------------------------------------------------------------------------


def test_scattered_blocks_arrive_and_nothing_else_is_touched(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Several parts, grids with gaps, two regions on either side; checked byte for byte."""
    ours = [make_memory(2 * MIB, seed=1), make_memory(MIB, seed=2)]
    for theirs in peer.memory:
        theirs.bytes[:] = 0xEE
    expected = [theirs.bytes.copy() for theirs in peer.memory]
    link = make_sender(*ours).connect("peer", peer.endpoint)
    random = np.random.default_rng(3)
    gapped = Grid(region=0, offset_bytes=100, block_bytes=3000, stride_bytes=5000, count=300)
    tight = Grid(region=1, offset_bytes=7, block_bytes=3000, stride_bytes=3000, count=1000)
    small = Grid(region=1, offset_bytes=0, block_bytes=512, stride_bytes=512, count=2048)
    into = Grid(region=0, offset_bytes=512, block_bytes=512, stride_bytes=1024, count=1000)
    pairs = [(gapped, tight, 250), (small, into, 700), (gapped, tight, 0), (small, into, 50)]
    parts: list[Part] = []
    for source, destination, count in pairs:
        taken = {
            int(block)
            for part in parts
            if part.destination == destination
            for block in part.destination_blocks
        }
        free = np.setdiff1d(np.arange(destination.count), list(taken))
        source_blocks = random.choice(source.count, count).astype(np.int32)
        destination_blocks = random.choice(free, count, replace=False).astype(np.int32)
        parts.append(Part(source, source_blocks, destination, destination_blocks))
        for one, other in zip(source_blocks.tolist(), destination_blocks.tolist(), strict=True):
            start = source.offset_bytes + one * source.stride_bytes
            end = destination.offset_bytes + other * destination.stride_bytes
            expected[destination.region][end : end + destination.block_bytes] = ours[source.region].bytes[
                start : start + source.block_bytes
            ]

    until_done(link.write(parts))

    for theirs, wanted in zip(peer.memory, expected, strict=True):
        assert np.array_equal(theirs.bytes, wanted)


def test_a_done_transfer_can_be_polled_on(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    ours = make_memory(MIB, seed=1)
    transfer = make_sender(ours).connect("peer", peer.endpoint).write([whole(MIB)])
    until_done(transfer)
    ours.bytes[:] = 0

    assert [transfer.poll() for _ in range(3)] == [Status.DONE] * 3
    assert peer.memory[0].bytes.any()


def test_index_arrays_may_be_views(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Every third, and backwards: such arrays are not contiguous."""
    ours = make_memory(MIB, seed=1)
    grid = plain_grid(MIB)
    numbers = np.arange(grid.count, dtype=np.int32)
    source_blocks, destination_blocks = numbers[::3], numbers[::-3]
    link = make_sender(ours).connect("peer", peer.endpoint)

    until_done(link.write([Part(grid, source_blocks, grid, destination_blocks)]))

    rows = peer.memory[0].bytes.reshape(-1, BLOCK_BYTES)
    assert np.array_equal(rows[destination_blocks], ours.bytes.reshape(-1, BLOCK_BYTES)[source_blocks])


def test_runs_of_blocks(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Long and short ones in one part, without gaps and with them."""
    ours = make_memory(MIB, seed=1)
    link = make_sender(ours).connect("peer", peer.endpoint)
    gapped = Grid(0, 0, BLOCK_BYTES // 2, BLOCK_BYTES, MIB // BLOCK_BYTES)
    rows = ours.bytes.reshape(-1, BLOCK_BYTES)
    for grid in (plain_grid(MIB), gapped):
        peer.memory[0].bytes[:] = 0
        expected = np.zeros_like(rows)
        for source, destination, length in ((3, 100, 1), (10, 20, 60), (200, 0, 7)):
            expected[destination : destination + length, : grid.block_bytes] = rows[
                source : source + length, : grid.block_bytes
            ]

        until_done(link.write([Part(grid, blocks(3, 10, 200), grid, blocks(100, 20, 0), blocks(1, 60, 7))]))

        assert np.array_equal(peer.memory[0].bytes[:MIB].reshape(-1, BLOCK_BYTES), expected)


def test_a_thousand_small_writes(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Several outstanding at a time; the last write to a block wins."""
    ours = make_memory(MIB, seed=1)
    backend = make_sender(ours)
    link = backend.connect("peer", peer.endpoint)
    grid = plain_grid(MIB)
    limit = min(16, backend.capabilities.max_outstanding_per_peer)
    moving: list[Transfer] = []
    expected = np.zeros(MIB, np.uint8).reshape(-1, BLOCK_BYTES)
    rows = ours.bytes.reshape(-1, BLOCK_BYTES)
    for number in range(1000):
        if len(moving) >= limit:
            until_done(moving.pop(0))
        source, destination = number * 7 % grid.count, number % grid.count
        expected[destination] = rows[source]
        moving.append(link.write([Part(grid, blocks(source), grid, blocks(destination))]))
    for transfer in moving:
        until_done(transfer)

    assert np.array_equal(peer.memory[0].bytes[:MIB].reshape(-1, BLOCK_BYTES), expected)


def test_two_links_in_two_threads(
    peer: Peer, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """One backend, two peers, each link used only by the thread that opened it."""
    peers, ours = [peer, make_peer(4 * MIB)], make_memory(4 * MIB, seed=1)
    backend = make_sender(ours)
    together = threading.Barrier(2)
    errors: list[BaseException] = []

    def send(number: int) -> None:
        try:
            link = backend.connect(f"peer-{number}", peers[number].endpoint)
            together.wait(PATIENCE_S)
            for _ in range(50):
                until_done(link.write([whole(4 * MIB)]))
        except BaseException as error:  # noqa: BLE001 - told below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert not errors
    for each in peers:
        assert np.array_equal(each.memory[0].bytes[: 4 * MIB], ours.bytes)


# --- bad arguments -----------------------------------------------------------------------------

GRID = plain_grid(MIB)
ONE = blocks(0)
BAD_PARTS = {
    "source region unknown": Part(Grid(1, 0, 64, 64, 4), ONE, Grid(0, 0, 64, 64, 4), ONE),
    "destination region unknown": Part(Grid(0, 0, 64, 64, 4), ONE, Grid(2, 0, 64, 64, 4), ONE),
    "region negative": Part(Grid(-1, 0, 64, 64, 4), ONE, Grid(0, 0, 64, 64, 4), ONE),
    "region beyond 64 bits": Part(Grid(2**70, 0, 64, 64, 4), ONE, Grid(0, 0, 64, 64, 4), ONE),
    "source grid one byte too long": Part(Grid(0, 1, 4096, 4096, 256), ONE, GRID, ONE),
    "destination grid one byte too long": Part(
        GRID, ONE, Grid(0, LARGE_BYTES - MIB + 1, 4096, 4096, 256), ONE
    ),
    "grid wraps around 64 bits": Part(GRID, ONE, Grid(0, 0, 4096, 2**63, 3), ONE),
    "offset negative": Part(GRID, ONE, Grid(0, -4096, 4096, 4096, 256), ONE),
    "stride negative": Part(GRID, ONE, Grid(0, MIB - 4096, 4096, -4096, 256), ONE),
    "stride smaller than block": Part(GRID, ONE, Grid(0, 0, 4096, 4095, 256), ONE),
    "no bytes in a block": Part(Grid(0, 0, 0, 64, 4), ONE, Grid(0, 0, 0, 64, 4), ONE),
    "no blocks in a grid": Part(Grid(0, 0, 64, 64, 0), ONE, GRID, ONE),
    "source block is the count": Part(GRID, blocks(256), GRID, ONE),
    "destination block is the count": Part(GRID, ONE, GRID, blocks(256)),
    "source block negative": Part(GRID, blocks(-1), GRID, ONE),
    "destination block negative": Part(GRID, ONE, GRID, blocks(-1)),
    "one bad block in many": Part(
        GRID, np.zeros(1000, np.int32), GRID, np.append(np.zeros(999, np.int32), ONE + 256)
    ),
    "lengths differ": Part(GRID, blocks(1, 2), GRID, ONE),
    "block sizes differ": Part(GRID, ONE, Grid(0, 0, 2048, 4096, 256), ONE),
    "no blocks": Part(GRID, blocks(), GRID, blocks()),
    "int64": Part(GRID, np.zeros(1, np.int64), GRID, ONE),
    "uint32": Part(GRID, ONE, GRID, np.zeros(1, np.uint32)),
    "other byte order": Part(GRID, ONE, GRID, np.zeros(1, ">i4")),
    "two dimensions": Part(GRID, np.zeros((2, 2), np.int32), GRID, np.zeros((2, 2), np.int32)),
    "a run beyond the grid": Part(GRID, blocks(0, 250), GRID, blocks(0, 249), blocks(5, 7)),
    "a run of nothing": Part(GRID, ONE, GRID, ONE, blocks(0)),
    "a run backwards": Part(GRID, blocks(4), GRID, blocks(4), blocks(-2)),
    "a length too many": Part(GRID, ONE, GRID, ONE, blocks(1, 1)),
    "int64 lengths": Part(GRID, ONE, GRID, ONE, np.ones(1, np.int64)),
    "a list": Part(GRID, [0], GRID, [0]),  # type: ignore[arg-type]
    "a float in a grid": Part(GRID, ONE, Grid(0, 0.5, 4096, 4096, 4), ONE),  # type: ignore[arg-type]
}


def test_bad_writes_are_refused_and_write_nothing(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Alone and after a good part; the link is as good as before."""
    ours = make_memory(MIB, seed=1)
    link = make_sender(ours).connect("peer", peer.endpoint)
    for what, part in BAD_PARTS.items():
        for parts in ([part], [whole(MIB), part]) if what != "no blocks" else ([part], []):
            try:
                link.write(parts)
            except InvalidTransferError:
                pass
            else:
                pytest.fail(f"{what}: accepted")
    assert not peer.memory[0].bytes.any()

    until_done(link.write([whole(MIB)]))

    assert np.array_equal(peer.memory[0].bytes[:MIB], ours.bytes)
    assert not peer.memory[0].bytes[MIB:].any()


def test_bad_memory_is_refused(make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """It must not reach a native engine, which would crash on it."""
    ours = make_memory(MIB)
    address = ours.region.address
    backend = make_sender()
    assert backend.register(Region(address, MIB // 2)) == 0
    bad = {
        "empty": Region(address + MIB // 2, 0),
        "negative length": Region(address + MIB // 2, -1),
        "null": Region(0, 4096),
        "not mapped": Region(4096, 4096),
        "beyond the mapping": Region(address + MIB // 2, 2**46),
        "overlaps": Region(address + MIB // 2 - 1, 4096),
        "inside another": Region(address + 4096, 4096),
        "unknown kind": Region(address + MIB // 2, 4096, memory="tape"),
    }
    for what, region in bad.items():
        try:
            backend.register(region)
        except InvalidTransferError:
            pass
        else:
            pytest.fail(f"{what}: accepted")

    assert backend.register(Region(address + MIB // 2, MIB // 2)) == 1


def test_bad_endpoints_are_refused(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Cut short anywhere, or of something else entirely."""
    ours = make_memory(MIB)
    backend = make_sender(ours)
    good = peer.endpoint
    bad = [b"", b"\x00", b"nonsense", b"\xc1" * 100, b"\x94\xa5other\x01\x02\x03", good + b"\x00"]
    bad += [good[:length] for length in range(1, len(good), max(1, len(good) // 40))]
    for endpoint in bad:
        with pytest.raises(ConnectError, match="somebody"):
            backend.connect("somebody", endpoint)

    until_done(backend.connect("peer", good).write([whole(MIB)]))


def test_unknown_options_are_refused(rig: Rig) -> None:
    with pytest.raises(BackendError, match="no_such_option"):
        type(rig.backend())("us", {**rig.options, "no_such_option": 1})


def test_calls_out_of_order_are_refused(rig: Rig, peer: Peer, make_memory: MakeMemory) -> None:
    ours = make_memory(MIB)
    backend = rig.backend()

    def refused() -> None:
        for call in (
            lambda: backend.register(ours.region),
            backend.endpoint,
            lambda: backend.connect("peer", peer.endpoint),
        ):
            with pytest.raises(BackendError):
                call()

    refused()
    backend.start(sends=True)
    backend.register(ours.region)
    link = backend.connect("peer", peer.endpoint)
    backend.close()
    refused()
    with pytest.raises(PeerDisconnectedError):
        link.write([whole(MIB)])
    backend.close()


# --- peers that die, stop, return --------------------------------------------------------------


def end_of_write_to_a_dead_peer(link: Link) -> None:
    """Write to a peer that is dead: refused, or failed and settled; either way it says so."""
    try:
        transfer = link.write([whole(MIB)])
    except PeerDisconnectedError:
        return
    assert until_terminal(transfer) is Status.FAILED
    assert isinstance(transfer.error, PeerDisconnectedError)
    assert transfer.settled


def test_a_peer_that_died_before(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """The open link says so, and a new one cannot be opened; case C10."""
    peer, backend = make_peer(MIB), make_sender(make_memory(MIB))
    link = backend.connect("peer", peer.endpoint)
    until_done(link.write([whole(MIB)]))

    peer.kill()

    end_of_write_to_a_dead_peer(link)
    with pytest.raises(PeerDisconnectedError):
        link.write([whole(MIB)])
    with pytest.raises(ConnectError):
        backend.connect("peer", peer.endpoint)
    link.fence()


def test_a_peer_that_dies_in_the_middle(
    rig: Rig, peer: Peer, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Every transfer to it fails and settles; another peer's goes on; case C10."""
    doomed = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES, seed=1))
    link, other_link = backend.connect("doomed", doomed.endpoint), backend.connect("other", peer.endpoint)
    with held_up(rig, doomed, link) as transfer:
        second = link.write([whole(LARGE_BYTES)])
        doomed.kill()
        for moving in (transfer, second):
            assert until_terminal(moving) is Status.FAILED
            assert isinstance(moving.error, PeerDisconnectedError)
            assert moving.settled

    until_done(other_link.write([whole(LARGE_BYTES)]))


def test_a_peer_that_stops_and_goes_on(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES, seed=1)
    link = make_sender(ours).connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        assert transfer.status is Status.MOVING
        assert not transfer.settled

    until_done(transfer)
    assert np.array_equal(peer.memory[0].bytes, ours.bytes)


def test_a_peer_that_returns(make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """The new incarnation is met with its new endpoint; nothing reaches it over the old link; case C07."""
    peer, ours = make_peer(MIB), make_memory(MIB, seed=1)
    backend = make_sender(ours)
    old_link = backend.connect("peer", peer.endpoint)
    until_done(old_link.write([whole(MIB)]))
    peer.kill()
    returned = make_peer(MIB)

    end_of_write_to_a_dead_peer(old_link)
    assert not returned.memory[0].bytes.any()
    until_done(backend.connect("peer", returned.endpoint).write([whole(MIB)]))

    assert np.array_equal(returned.memory[0].bytes, ours.bytes)


# --- fences ------------------------------------------------------------------------------------


def test_a_fence_in_the_middle(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """After it nothing is read from the source, and other links are untouched; case C17."""
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES)
    ours.bytes[:] = 1
    backend = make_sender(ours)
    link, other_link = backend.connect("peer", peer.endpoint), backend.connect("peer-again", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        link.fence()
        assert transfer.status is Status.FAILED
        assert transfer.settled
        assert isinstance(transfer.error, BackendError)
        ours.bytes[:] = 0xFF

    # The peer serves all that it has received before it answers on a link of its own.
    one = Part(plain_grid(LARGE_BYTES), blocks(0), plain_grid(LARGE_BYTES), blocks(0))
    ours.bytes[:BLOCK_BYTES] = 2
    for _ in range(100):
        until_done(other_link.write([one]))
    assert not (peer.memory[0].bytes == 0xFF).any()
    assert transfer.poll() is Status.FAILED
    with pytest.raises(PeerDisconnectedError):
        link.write([one])
    link.fence()


def test_close_with_transfers_outstanding(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """It returns, and settles all of them."""
    peer = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES))
    link = backend.connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        second = link.write([whole(LARGE_BYTES)])
        backend.close()

        assert [moving.status for moving in (transfer, second)] == [Status.FAILED] * 2
        assert transfer.settled
        assert second.settled


def test_outstanding_transfers_are_bounded(
    rig: Rig, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """One more than declared is refused; all others arrive."""
    peer = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES, seed=1))
    link = backend.connect("peer", peer.endpoint)
    limit = backend.capabilities.max_outstanding_per_peer
    with held_up(rig, peer, link) as transfer:
        moving = [transfer, *(link.write([whole(2 * MIB)]) for _ in range(limit - 1))]
        with pytest.raises(TransferError, match=str(limit)):
            link.write([whole(2 * MIB)])

    eventually(lambda: [other for other in moving if other.poll() is Status.MOVING] == [], PATIENCE_S)
    assert {other.status for other in moving} == {Status.DONE}


# --- the end of the process --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "not closed", "moving"])
def test_the_process_ends_in_good_order(
    rig: Rig, peer: Peer, make_peer: MakePeer, make_memory: MakeMemory, how: str
) -> None:
    """Exit code 0 and not one byte of a native library's on stdout."""
    peer = make_peer(LARGE_BYTES) if how == "moving" else peer
    ours = make_memory(LARGE_BYTES, seed=1)
    program = [sys.executable, "-m", "tests.backends.sender_program", rig.name, json.dumps(rig.options)]
    arguments = [ours.path, str(LARGE_BYTES), peer.endpoint.hex(), how]
    with subprocess.Popen(
        [*program, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "connected\n"
        if how == "moving":
            rig.hold_up(peer)
        try:
            printed, _ = sender.communicate("go\n", timeout=PATIENCE_S)
        finally:
            sender.kill()
            rig.let_go(peer)

    assert (sender.returncode, printed) == (0, "sent\n")
