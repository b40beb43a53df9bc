"""Ranks against a real peer over real sockets: what is said, what is heard, lockstep."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from coordinator.client import ClientSettings, DecodeRank, Endpoint, KVPool, PrefillRank, RankState
from coordinator.client.inbox import Head
from coordinator.errors import (
    NotReadyError,
    PoolError,
    ProtocolError,
)
from coordinator.messages import (
    VERSION,
    Cancel,
    Extend,
    Offer,
    Open,
    Outcome,
    Released,
    Role,
    Send,
)
from tests.client.peer import LAYOUT, Peer, drain_until, outcomes
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.messages import Event
    from tests.client.conftest import Connect


def test_a_rank_introduces_itself(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)

    hello = peer.hellos[0]
    assert (hello.version, hello.role, hello.group, hello.rank) == (VERSION, Role.PREFILL, "prefill", 0)
    assert hello.process.pid == os.getpid()
    assert hello.process.boot_id
    assert hello.process.pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
    assert hello.layout == LAYOUT
    assert hello.pool.pages == 64
    assert hello.pool.size_bytes == Path(hello.pool.path).stat().st_size
    assert (hello.epoch, hello.acknowledged) == (0, 0)
    assert rank.state is RankState.READY


def test_what_a_prefill_rank_says_arrives_in_order(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.open(5)
    rank.send(5, [3, 1])
    rank.send(5, np.array([2]), last=True, aux=b"token")
    rank.cancel(6, "the user has left")
    eventually(lambda: len(peer.items("prefill")) == 4, 10, "four items")
    assert peer.items("prefill") == [
        Open(5, 0),
        Send(5, 0, np.array([3, 1], "<i4").tobytes(), last=False),
        Send(5, 0, np.array([2], "<i4").tobytes(), last=True, aux=b"token"),
        Cancel(6, 0, "the user has left"),
    ]


def test_what_a_decode_rank_says_arrives_in_order(peer: Peer) -> None:
    with (
        KVPool.allocate(LAYOUT, 8) as pool,
        Endpoint(pool, backend="loopback") as endpoint,
        DecodeRank.connect(peer.control, group="d", rank=0, world_size=1, endpoint=endpoint) as rank,
    ):
        rank.offer(9, [7, 0, 3], prefix_pages=1)
        rank.extend(9)
        rank.cancel(9)
        eventually(lambda: len(peer.items("d")) == 3, 10, "three items")
        packed = np.array([7, 0, 3], "<i4").tobytes()
        assert peer.items("d") == [Offer(9, 0, packed, 1), Extend(9, 0), Cancel(9, 0)]
        hello = peer.hellos[0]
        assert (hello.role, hello.backend, hello.endpoint) == (Role.DECODE, "loopback", endpoint.address)

        with pytest.raises(PoolError, match="page 3 is named twice"):
            rank.offer(10, [3, 4, 3])
        with pytest.raises(PoolError, match="prefix_pages is -1, must be from 0"):
            rank.offer(10, [3, 4], prefix_pages=-1)


def test_events_are_drained_once_and_acknowledged_when_they_are_visible(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    assert not rank.drain()
    events: list[Event] = [Outcome(5, 1, aux=b"x"), Released(5, 1)]
    peer.publish("prefill", *events)
    eventually(lambda: peer.acknowledged("prefill") == 2, 10, "the acknowledgement")
    assert list(rank.drain()) == events
    assert not rank.drain()


def test_later_items_say_what_the_engine_had_drained(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([5, 6]))
    rank.open(1)
    assert len(drain_until(rank, 2)) == 2
    rank.open(2)
    eventually(lambda: len(peer.items("prefill")) == 2, 10, "two items")
    assert peer.items("prefill") == [Open(1, 0), Open(2, 2)]
    eventually(lambda: peer.submits[-1].applied == 2, 10, "applied")


def test_lockstep_drains_exactly_up_to_the_token(peer: Peer, connect: Connect) -> None:
    first, second = connect(peer.control, 0, 2), connect(peer.control, 1, 2)
    for rank in (first, second):
        rank.wait_ready(10)
    start = first.head
    peer.publish("prefill", *outcomes([1, 2, 3]))
    eventually(lambda: first.head != start and Head.unpack(first.head).number == 3, 10, "a stable head")
    middle = Head(peer.epoch, 2).pack()
    assert list(first.drain(through=middle)) == outcomes([1, 2])
    # Every rank has what is stable: nobody waits.
    assert list(second.drain(through=middle)) == outcomes([1, 2])
    assert second.drain(through=middle) == ()
    assert list(second.drain(through=first.head)) == outcomes([3])
    assert second.drain(through=first.head) == ()
    assert list(first.drain()) == outcomes([3])


def test_a_head_covers_only_what_the_slowest_rank_has(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control, 0, 2)
    other = connect(peer.control, 1, 2)
    for each in (rank, other):
        each.wait_ready(10)
    other._io._stopping = True
    other._io._wake.ring()
    other._io._thread.join()
    peer.publish("prefill", *outcomes([1]))
    eventually(lambda: peer.acknowledged("prefill", 0) == 1, 10, "the acknowledgement")
    beats = len(peer.submits)
    eventually(lambda: len(peer.submits) > beats + 2, 10, "two more heartbeats")
    assert Head.unpack(rank.head).number == 0
    assert list(rank.drain(through=rank.head)) == []


def test_a_token_ahead_of_this_rank_is_waited_for(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    token = Head(peer.epoch, 1).pack()
    drained: list[Sequence[Event]] = []
    engine = threading.Thread(target=lambda: drained.append(rank.drain(through=token)))
    engine.start()
    peer.publish("prefill", *outcomes([1, 2]))
    engine.join(10)
    assert [list(events) for events in drained] == [outcomes([1])]


def test_a_token_that_is_never_reached_is_an_error(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control, settings=ClientSettings(lockstep_wait_s=0.05))
    rank.wait_ready(10)
    with pytest.raises(NotReadyError, match=r"prefill/0 .* event 9 of epoch 0x7"):
        rank.drain(through=Head(peer.epoch, 9).pack())
    with pytest.raises(NotReadyError, match="epoch 0x63"):
        rank.drain(through=Head(99, 0).pack())


@pytest.mark.parametrize("token", [b"", b"x" * 16, Head(1, 1).pack()[:-1] + b"\3"])
def test_a_token_that_is_none_is_refused(peer: Peer, connect: Connect, token: bytes) -> None:
    rank = connect(peer.control)
    with pytest.raises(ProtocolError, match="head token"):
        rank.drain(through=token)


def test_names_and_numbers_are_checked_here(peer: Peer) -> None:
    with KVPool.allocate(LAYOUT, 4, 2) as pool:

        def connect(group: str = "g", rank: int = 0, world_size: int = 2) -> None:
            PrefillRank.connect(
                peer.control, group=group, rank=rank, world_size=world_size, pool=pool
            ).close()

        with pytest.raises(ProtocolError, match="rank is 2, must be from 0 to world_size - 1"):
            connect(rank=2)
        with pytest.raises(ProtocolError, match="A group's name has"):
            connect(group="a group")
        with pytest.raises(PoolError, match="world_size is 4, but the pool was allocated for world_size 2"):
            connect(world_size=4)
        with pytest.raises(ProtocolError, match="cannot be introduced"):
            connect(rank=cast("int", np.int64(1)))
    with pytest.raises(PoolError, match="closed"):
        connect()


@pytest.mark.parametrize("room", [0, -1, 2**64, 1.5, "7", None])
def test_no_such_room_can_be(peer: Peer, connect: Connect, room: int) -> None:
    """Case C35: the null id."""
    rank = connect(peer.control)
    with pytest.raises(ProtocolError, match="room is"):
        rank.open(room)


def test_rooms_may_be_any_kind_of_integer(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.open(np.uint64(2**64 - 1))
    rank.send(np.int64(3), [])
    eventually(lambda: len(peer.items("prefill")) == 2, 10, "two items")
    assert peer.items("prefill") == [Open(2**64 - 1, 0), Send(3, 0, b"", last=False)]


def test_aux_is_checked(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    with pytest.raises(ProtocolError, match="aux has 1048577 bytes, at most 1048576"):
        rank.send(1, [], last=True, aux=bytes((1 << 20) + 1))
    with pytest.raises(ProtocolError, match="aux is of type str"):
        rank.send(1, [], last=True, aux=cast("bytes", "text"))
    rank.send(1, [], last=True, aux=cast("bytes", memoryview(b"ab")))
    eventually(lambda: peer.items("prefill") == [Send(1, 0, b"", last=True, aux=b"ab")], 10, "the item")
