"""What a link posts, and when its transfers are over, without an engine: pieces end as the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from backends import mooncake_link
from backends.base import Grid, Part, PeerDisconnectedError, Region, Status, Transfer, TransferError
from backends.mooncake_link import MooncakeLink

if TYPE_CHECKING:
    from backends.mooncake_connections import Connections
    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_presence import Presence
    from backends.mooncake_transfer import MooncakeTransfer, Piece

BLOCK_BYTES = 4096
BLOCKS = 64
SIZE = 2 * BLOCKS * BLOCK_BYTES
OURS, THEIRS = 1 << 30, 1 << 40


class HandConnections:
    """Keeps every piece until the test ends it."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.is_busy = False
        self.pieces: list[tuple[MooncakeTransfer, Piece]] = []
        self.posted: list[Piece] = []
        self.ends: list[tuple[MooncakeTransfer, bool]] = []
        self.destroyed = False

    @property
    def has_room(self) -> bool:
        return len(self.pieces) < self.left

    def submit(self, transfer: MooncakeTransfer, piece: Piece) -> None:
        assert not self.destroyed
        assert not transfer.settled, "its source may be something else by now"
        self.pieces.append((transfer, piece))
        self.posted.append(piece)

    def end(self, *, done: bool = True) -> None:
        """End the oldest piece; a connection whose piece has failed is not used again."""
        transfer, _ = self.pieces.pop(0)
        self.ends.append((transfer, done))
        self.left -= not done

    def ended(self) -> list[tuple[MooncakeTransfer, bool]]:
        ends, self.ends = self.ends, []
        return ends

    def destroy(self) -> None:
        self.destroyed = True


class HandPresence:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = 0
        self.closed = False

    def ask(self) -> int:
        self.asked += 1
        return self.asked

    def lost(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True


class Bench:
    """A link of four connections."""

    def __init__(self) -> None:
        self.connections = HandConnections(4)
        self.presence = HandPresence()
        remote = SimpleNamespace(regions=[SimpleNamespace(address=THEIRS, size_bytes=SIZE)])
        self.link = MooncakeLink(
            "peer",
            cast("Connections", self.connections),
            cast("Presence", self.presence),
            [Region(OURS, SIZE)],
            cast("Endpoint", remote),
        )

    def write(self, blocks: int = BLOCKS) -> Transfer:
        """Write every other block: each is a piece."""
        grid = Grid(0, 0, BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCKS)
        numbers = np.arange(blocks, dtype=np.int32)
        return self.link.write([Part(grid, numbers, grid, numbers)])

    def end_all(self, *transfers: Transfer) -> None:
        """End what is posted and what is posted then, until all are over."""
        for _ in range(4 * BLOCKS):
            while self.connections.pieces:
                self.connections.end()
            for transfer in transfers:
                transfer.poll()
        assert all(transfer.settled for transfer in transfers)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_piece_is_posted_once_and_done_only_with_the_last(bench: Bench) -> None:
    transfer = bench.write(6)
    for _ in range(5):
        bench.connections.end()
        assert transfer.poll() is Status.MOVING
    bench.connections.end()
    assert transfer.poll() is Status.DONE
    assert bench.connections.posted == [
        (OURS + offset, THEIRS + offset, BLOCK_BYTES)
        for offset in range(0, 12 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    ]


def test_of_a_write_of_which_a_piece_has_failed_no_more_is_posted(bench: Bench) -> None:
    transfer, other = bench.write(), bench.write(3)
    bench.connections.end(done=False)
    assert transfer.poll() is Status.MOVING, "nobody knows yet whether the peer is there"
    assert not transfer.settled
    posted = len(bench.connections.posted)
    bench.presence.answers = bench.presence.asked
    bench.end_all(transfer, other)
    assert isinstance(transfer.error, TransferError)
    assert other.status is Status.DONE
    assert len(bench.connections.posted) == posted + 3, "the other one's"


def test_a_failed_write_is_settled_only_with_the_last_of_its_pieces(bench: Bench) -> None:
    transfer = bench.write(4)
    bench.connections.end(done=False)
    bench.presence.answers = 1
    assert transfer.poll() is Status.FAILED
    for _ in range(3):
        assert not transfer.settled
        bench.connections.end()
        transfer.poll()
    assert transfer.settled


def test_while_the_peer_has_not_answered_nothing_is_posted_and_nothing_is_over(bench: Bench) -> None:
    failed, waiting = bench.write(1), bench.write()
    bench.connections.end(done=False)
    posted = len(bench.connections.posted)
    while bench.connections.pieces:
        bench.connections.end()
    for transfer in (failed, waiting, failed, waiting):
        assert transfer.poll() is Status.MOVING
        assert not transfer.settled
    assert len(bench.connections.posted) == posted
    bench.presence.answers = 1
    failed.poll()
    assert len(bench.connections.posted) > posted


def test_a_peer_that_does_not_answer_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_link, "_ANSWER_S", -1.0)
    transfer, other = bench.write(), bench.write()
    bench.connections.end(done=False)
    transfer.poll()
    assert bench.connections.destroyed
    assert bench.presence.closed
    for one in (transfer, other):
        assert one.settled
        assert isinstance(one.error, PeerDisconnectedError)
    with pytest.raises(PeerDisconnectedError, match="does not answer any more; connect anew"):
        bench.write()
