"""Ranks against a real peer over real sockets."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from coordinator.client import ClientSettings, DecodeRank, Endpoint, KVPool, PrefillRank, RankState
from coordinator.client.inbox import Head
from coordinator.errors import (
    ClosedError,
    ConfigError,
    NotReadyError,
    PoolError,
    ProtocolError,
    QueueFullError,
    RefusedError,
)
from coordinator.messages import (
    VERSION,
    Broadcast,
    Cancel,
    Extend,
    Offer,
    Open,
    Outcome,
    Refused,
    Released,
    Role,
    Send,
    WhoAreYou,
)
from tests.client.peer import LAYOUT, Peer, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from coordinator.client.rank import Rank
    from coordinator.messages import Event
    from tests.client.conftest import Connect


def outcomes(rooms: Sequence[int]) -> list[Outcome]:
    return [Outcome(room, 1) for room in rooms]


def drain_until(rank: Rank, count: int) -> list[Event]:
    """Drain until there are ``count`` events, or more."""
    events: list[Event] = []
    deadline_s = time.monotonic() + 10
    while len(events) < count:
        assert rank.wait(deadline_s - time.monotonic()), f"only {len(events)} of {count} events came"
        events += rank.drain()
    return events


def test_a_rank_introduces_itself(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)

    hello = peer.hellos[0]
    assert (hello.version, hello.role, hello.group, hello.rank) == (VERSION, Role.PREFILL, "prefill", 0)
    assert hello.process.pid == os.getpid()
    assert hello.process.boot_id
    assert hello.process.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert hello.layout == LAYOUT
    assert hello.pool.pages == 64
    assert hello.pool.size_bytes == os.stat(hello.pool.path).st_size
    assert (hello.epoch, hello.acknowledged) == (0, 0)
    assert rank.state is RankState.READY


def test_what_a_prefill_rank_says_arrives_in_order(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.open(5)
    rank.send(5, [3, 1])
    rank.send(5, np.array([2]), last=True, aux=b"token")
    rank.cancel(6, "the user has left")
    eventually(lambda: len(peer.items("prefill")) == 4, "four items")
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
        eventually(lambda: len(peer.items("d")) == 3, "three items")
        packed = np.array([7, 0, 3], "<i4").tobytes()
        assert peer.items("d") == [Offer(9, 0, packed, 1), Extend(9, 0), Cancel(9, 0)]
        hello = peer.hellos[0]
        assert (hello.role, hello.backend, hello.endpoint) == (Role.DECODE, "loopback", endpoint.address)

        with pytest.raises(PoolError, match="page 3 is named twice"):
            rank.offer(10, [3, 4, 3])
        with pytest.raises(PoolError, match="prefix_pages is 3, must be from 0 to the 2 pages"):
            rank.offer(10, [3, 4], prefix_pages=3)


def test_events_are_drained_once_and_acknowledged_when_they_are_visible(
    peer: Peer, connect: Connect
) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    assert rank.drain() == ()
    events = [Outcome(5, 1, aux=b"x"), Released(5, 1)]
    peer.publish("prefill", *events)
    eventually(lambda: peer.acknowledged("prefill") == 2, "the acknowledgement")
    assert list(rank.drain()) == events
    assert rank.drain() == ()


def test_later_items_say_what_the_engine_had_drained(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([5, 6]))
    rank.open(1)
    assert len(drain_until(rank, 2)) == 2
    rank.open(2)
    eventually(lambda: len(peer.items("prefill")) == 2, "two items")
    assert peer.items("prefill") == [Open(1, 0), Open(2, 2)]
    eventually(lambda: peer.submits[-1].applied == 2, "applied")


def test_lockstep_drains_exactly_up_to_the_token(peer: Peer, connect: Connect) -> None:
    first, second = connect(peer.control, 0, 2), connect(peer.control, 1, 2)
    for rank in (first, second):
        rank.wait_ready(10)
    start = first.head
    peer.publish("prefill", *outcomes([1, 2, 3]))
    eventually(lambda: first.head != start and Head.unpack(first.head).number == 3, "a stable head")
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
    eventually(lambda: peer.acknowledged("prefill", 0) == 1, "the acknowledgement")
    beats = len(peer.submits)
    eventually(lambda: len(peer.submits) > beats + 2, "two more heartbeats")
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


@pytest.mark.parametrize("token", [b"", b"x" * 16, Head(1, 1).pack()[:-1] + b"\2"])
def test_a_token_that_is_none_is_refused(peer: Peer, connect: Connect, token: bytes) -> None:
    rank = connect(peer.control)
    with pytest.raises(ProtocolError, match="head token"):
        rank.drain(through=token)


def test_lost_broadcasts_are_fetched(peer: Peer, connect: Connect) -> None:
    """Case C05: one is lost in the middle, and one at the end with nothing behind it."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    lost: list[int] = []

    def drop(broadcast: Broadcast) -> bool:
        is_lost = bool(broadcast.events) and broadcast.first in (2, 4)
        if is_lost:
            lost.append(broadcast.first)
        return is_lost

    peer.drop = drop
    for room in (1, 2, 3, 4):
        peer.publish("prefill", Outcome(room, 1))
        eventually(lambda room=room: peer.groups["prefill"].published == room, "published")  # type: ignore[misc]
    assert drain_until(rank, 4) == outcomes([1, 2, 3, 4])
    assert lost == [2, 4]
    eventually(lambda: peer.acknowledged("prefill") == 4, "the acknowledgement")
    assert rank.drain() == ()


def test_a_backlog_comes_in_parts(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.max_welcome = 3
    peer.drop = lambda broadcast: bool(broadcast.events)
    peer.publish("prefill", *outcomes(range(1, 11)))
    assert drain_until(rank, 10) == outcomes(range(1, 11))


def test_a_late_joiner_gets_what_it_missed(peer: Peer, connect: Connect) -> None:
    """Case C41."""
    first = connect(peer.control, 0, 2)
    eventually(lambda: first.state is RankState.JOINED, "joined")
    peer.publish("prefill", *outcomes([1, 2]))
    late = connect(peer.control, 1, 2)
    assert drain_until(late, 2) == outcomes([1, 2])
    assert drain_until(first, 2) == outcomes([1, 2])


def test_a_group_that_is_not_complete_is_named(peer: Peer, connect: Connect) -> None:
    """Case C41: the error says what the coordinator waits for."""
    rank = connect(peer.control, 0, 2)
    eventually(lambda: rank.state is RankState.JOINED, "joined")
    with pytest.raises(NotReadyError, match="prefill/0 is not ready after 0.01 s.*waits for other ranks"):
        rank.wait_ready(0.01)
    peer.say("prefill", 0, Refused("not_ready", "prefill/1 is missing"))
    eventually(lambda: "prefill/1 is missing" in rank._conversation.explain(), "the coordinator's word")
    with pytest.raises(NotReadyError, match="it said: prefill/1 is missing"):
        rank.wait_ready(0.01)


def test_a_refusal_of_one_call_is_told_to_this_rank(peer: Peer, connect: Connect) -> None:
    """Case C35: the newcomer hears it."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    assert rank.refusals() == []
    refused = Refused("room_active", "room 5 is being handed over already", room=5)
    peer.say("prefill", 0, refused)
    assert rank.wait(10)
    assert rank.refusals() == [refused]
    assert rank.refusals() == []
    assert rank.state is RankState.READY


def test_a_refused_registration_is_raised_from_every_call(peer: Peer, connect: Connect) -> None:
    peer.refusal = Refused("world_size", "world_size is 4 elsewhere, 1 here", fatal=True)
    rank = connect(peer.control)
    with pytest.raises(RefusedError, match="world_size is 4 elsewhere, 1 here"):
        rank.wait_ready(10)
    assert rank.state is RankState.REFUSED
    for call in (
        lambda: rank.send(1, [1]),
        lambda: rank.open(1),
        lambda: rank.cancel(1),
        rank.drain,
        lambda: rank.drain(through=rank.head),
        rank.refusals,
    ):
        with pytest.raises(RefusedError, match="refuses prefill/0"):
            call()
    hellos = len(peer.hellos)
    rank.close()
    assert len(peer.hellos) == hellos


def test_a_registration_refused_for_now_is_tried_again(peer: Peer, connect: Connect) -> None:
    peer.refusal = Refused("draining", "the coordinator is about to stop")
    rank = connect(peer.control, settings=ClientSettings(hello_retry_s=0.05))
    eventually(lambda: len(peer.hellos) >= 2, "another try")
    with pytest.raises(NotReadyError, match="about to stop"):
        rank.wait_ready(0.01)
    peer.refusal = None
    rank.wait_ready(10)


def test_an_absent_coordinator_is_visible_and_the_queue_is_bounded(
    tmp_path: Path, connect: Connect
) -> None:
    rank = connect(f"ipc://{tmp_path}/nobody", settings=ClientSettings(queue_items=100))
    for room in range(1, 101):
        rank.open(room)
    with pytest.raises(QueueFullError, match=r"100 calls .* no coordinator at ipc://.* has accepted"):
        rank.open(101)
    assert rank.state is RankState.CONNECTING
    assert rank.drain() == ()
    with Peer(tmp_path) as peer, pytest.raises(NotReadyError, match="no coordinator at"):
        # It listens elsewhere.
        assert peer.control != rank._conversation._address
        rank.wait_ready(0.01)


def test_the_queue_is_bounded_in_bytes(tmp_path: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{tmp_path}/nobody", settings=ClientSettings(queue_bytes=10_000))
    with pytest.raises(QueueFullError, match="bytes"):
        for room in range(1, 100):
            rank.send(room, [1], last=True, aux=b"x" * 1000)
    assert 8_000 < rank._conversation.outbox.size_bytes <= 10_000


def test_what_was_said_before_the_coordinator_came_is_heard(tmp_path: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{tmp_path}/control")
    for room in range(1, 2001):
        rank.open(room)
    with Peer(tmp_path) as peer:
        eventually(lambda: len(peer.items("prefill")) == 2000, "all items")
        assert peer.items("prefill") == [Open(room, 0) for room in range(1, 2001)]
        eventually(lambda: len(rank._conversation.outbox) == 0, "all confirmed")


def test_a_coordinator_that_comes_back_is_joined_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([1, 2]))
    assert drain_until(rank, 2) == outcomes([1, 2])
    old = rank.head

    peer.stop()
    eventually(lambda: rank.state is RankState.COORDINATOR_AWAY, "away")
    rank.open(7)
    with pytest.raises(NotReadyError, match="is away"):
        rank.wait_ready(0.01)
    peer.restart(epoch=8)
    rank.wait_ready(10)

    eventually(lambda: peer.items("prefill") == [Open(7, 0)], "the room, said to the new coordinator")
    assert peer.hellos[-1].epoch == 7
    assert peer.hellos[-1].acknowledged == 2
    peer.publish("prefill", *outcomes([3]))
    assert drain_until(rank, 1) == outcomes([3])
    assert rank.drain(through=old) == []
    rank.open(8)
    eventually(lambda: peer.items("prefill") == [Open(7, 0), Open(8, 1)], "a number of the new epoch")


def test_a_coordinator_that_was_replaced_at_once_is_joined_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.restart(epoch=8)
    rank.open(7)
    eventually(lambda: peer.items("prefill") == [Open(7, 0)], "the room, said to the new coordinator")
    rank.wait_ready(10)


def test_a_rank_that_was_forgotten_introduces_itself_again(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.open(1)
    eventually(lambda: len(peer.items("prefill")) == 1, "one item")
    peer.forget()
    rank.open(2)
    eventually(lambda: len(peer.hellos) == 2, "another Hello")
    eventually(lambda: peer.items("prefill") == [Open(1, 0), Open(2, 0)], "both, once")


def test_unknown_epochs_and_unasked_questions_change_nothing_for_the_engine(
    peer: Peer, connect: Connect
) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.say("prefill", 0, WhoAreYou(7))
    eventually(lambda: len(peer.hellos) == 2, "another Hello")
    peer.publish("prefill", *outcomes([1]))
    assert drain_until(rank, 1) == outcomes([1])


def test_garbage_is_counted_and_dropped(peer: Peer, connect: Connect) -> None:
    """Case C39."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.say_bytes("prefill", 0, [b"\xc1garbage"])
    peer.say_bytes("prefill", 0, [b"two", b"frames"])
    peer.broadcast_bytes([b"prefill\0"])
    peer.broadcast_bytes([b"prefill\0", b"\xc1garbage"])
    peer.broadcast_bytes([b"prefill\0", b"three", b"frames"])
    eventually(lambda: rank._io.malformed == 5, "five dropped frames")
    peer.publish("prefill", *outcomes([1]))
    assert drain_until(rank, 1) == outcomes([1])


def test_an_address_that_cannot_be_subscribed_to_is_told(tmp_path: Path, connect: Connect) -> None:
    """Case C33."""
    with Peer(tmp_path, outcomes="tcp://*:notaport") as peer:
        rank = connect(peer.control)
        with pytest.raises(RefusedError, match=r"subscribe to 'tcp://\*:notaport'.*correct the address"):
            rank.wait_ready(10)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://host", "ftp://host:1"])
def test_an_address_that_cannot_be_used_is_refused_at_once(connect: Connect, address: str) -> None:
    with pytest.raises(ConfigError, match="address: .* cannot be used"):
        connect(address)


def test_names_and_numbers_are_checked_here(peer: Peer) -> None:
    with KVPool.allocate(LAYOUT, 4, 2) as pool:

        def connect(group: str = "g", rank: int = 0, world_size: int = 2) -> None:
            PrefillRank.connect(
                peer.control, group=group, rank=rank, world_size=world_size, pool=pool
            ).close()

        with pytest.raises(ProtocolError, match="rank is 2, must be from 0 to world_size - 1"):
            connect(rank=2)
        with pytest.raises(ProtocolError, match="group"):
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
    eventually(lambda: len(peer.items("prefill")) == 2, "two items")
    assert peer.items("prefill") == [Open(2**64 - 1, 0), Send(3, 0, b"", last=False)]


def test_aux_is_checked(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    with pytest.raises(ProtocolError, match="aux has 1048577 bytes, at most 1048576"):
        rank.send(1, [], last=True, aux=bytes((1 << 20) + 1))
    with pytest.raises(ProtocolError, match="aux is of type str"):
        rank.send(1, [], last=True, aux=cast("bytes", "text"))
    rank.send(1, [], last=True, aux=cast("bytes", memoryview(b"ab")))
    eventually(lambda: peer.items("prefill") == [Send(1, 0, b"", last=True, aux=b"ab")], "the item")


def test_many_threads_say_much_and_no_frame_is_torn(peer: Peer, connect: Connect) -> None:
    """Case C40: 8 threads, 10,000 calls each."""
    rank = connect(peer.control, settings=ClientSettings(queue_items=80_000))
    rank.wait_ready(10)
    failures: list[BaseException] = []

    def say(thread: int) -> None:
        try:
            for number in range(10_000):
                rank.send(1 + thread, np.arange(number % 8), aux=number.to_bytes(4, "little"))
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=say, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    eventually(lambda: len(peer.items("prefill")) == 80_000, "all items", timeout_s=30)
    assert peer.malformed == 0
    said: dict[int, int] = dict.fromkeys(range(1, 9), 0)
    for item in peer.items("prefill"):
        assert isinstance(item, Send)
        number = said[item.room]
        assert item.aux == number.to_bytes(4, "little")
        assert item.pages == np.arange(number % 8, dtype="<i4").tobytes()
        said[item.room] += 1


def test_an_engine_may_sleep_on_the_descriptor(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.drain()
    assert rank.drain() == ()
    assert select.select([rank], [], [], 0)[0] == []
    peer.publish("prefill", *outcomes([1]))
    assert select.select([rank], [], [], 10)[0] == [rank]
    drain_until(rank, 1)
    # The head follows when all ranks have the event.
    eventually(lambda: Head.unpack(rank.head).number == 1, "a stable head")
    rank.drain()
    assert select.select([rank], [], [], 0)[0] == []


def test_waiting_ends_when_the_time_is_over(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.drain()
    assert rank.wait(0.01) is False


def test_the_death_of_the_thread_is_raised_from_every_call(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([1]))
    eventually(lambda: peer.acknowledged("prefill") == 1, "the acknowledgement")
    # No call does this: an item that cannot be encoded.
    rank._io.say(0, cast("Open", object()), 1)
    eventually(lambda: rank.state is RankState.CLOSED, "the thread's death")
    # What had arrived before is a fact all the same.
    assert list(rank.drain()) == outcomes([1])
    for call in (rank.drain, lambda: rank.open(1), rank.refusals, lambda: rank.wait_ready(1)):
        with pytest.raises(ClosedError, match="the I/O thread of prefill/0 has died of") as caught:
            call()
        assert isinstance(caught.value.__cause__, TypeError)


def test_closing_sends_what_is_queued_and_says_goodbye(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    descriptors = len(os.listdir("/proc/self/fd"))
    for room in range(1, 3001):
        rank.open(room)
    rank.close()
    eventually(lambda: peer.byes == 1, "the goodbye")
    assert len(peer.items("prefill")) == 3000
    assert rank.state is RankState.CLOSED
    with pytest.raises(ClosedError, match="prefill/0 was closed by its engine"):
        rank.open(1)
    with pytest.raises(ClosedError):
        rank.drain()
    rank.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) < descriptors, "the sockets are closed")


def test_closing_without_a_coordinator_takes_no_time(tmp_path: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{tmp_path}/nobody")
    for room in range(1, 5001):
        rank.open(room)
    before_s = time.monotonic()
    rank.close()
    assert time.monotonic() - before_s < 1
    assert not rank._io._thread.is_alive()


def test_closing_before_a_deaf_coordinator_takes_no_time(peer: Peer, connect: Connect) -> None:
    """Case C14: it is there, but reads nothing."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.deaf = True
    for room in range(1, 20_001):
        rank.send(room, [], aux=b"x" * 1000)
    before_s = time.monotonic()
    rank.close()
    assert time.monotonic() - before_s < 2


def test_a_rank_that_nobody_refers_to_says_goodbye(peer: Peer) -> None:
    with KVPool.allocate(LAYOUT, 4) as pool:
        rank = PrefillRank.connect(peer.control, group="g", rank=0, world_size=1, pool=pool)
        rank.wait_ready(10)
        del rank
        eventually(lambda: peer.byes == 1, "the goodbye")


def test_a_forked_child_is_told_to_connect_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rank.open(1)
        except ClosedError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rank.open(2)
    eventually(lambda: peer.items("prefill") == [Open(2, 0)], "the parent's item")


def test_silence_is_noticed_and_healed(peer: Peer, connect: Connect) -> None:
    """Case C42: the sockets are there, but nothing comes through them; they are made anew."""
    settings = ClientSettings(away_after_s=0.3, hello_retry_s=0.05)
    rank = connect(peer.control, settings=settings)
    rank.wait_ready(10)
    peer.drop = lambda _: True
    peer.deaf = True
    eventually(lambda: rank.state is RankState.COORDINATOR_AWAY, "away")
    rank.open(1)
    eventually(lambda: rank._conversation.connections >= 2, "new sockets")
    peer.drop = lambda _: False
    peer.deaf = False
    rank.wait_ready(10)
    eventually(lambda: peer.items("prefill") == [Open(1, 0)], "what was said meanwhile")


def test_an_engine_that_never_drains_holds_up_only_itself(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control, settings=ClientSettings(undrained_events=10))
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes(range(1, 26)))
    eventually(lambda: peer.acknowledged("prefill") == 10, "as much as fits")
    beats = len(peer.submits)
    eventually(lambda: len(peer.submits) > beats + 2, "two more heartbeats")
    assert peer.acknowledged("prefill") == 10
    assert drain_until(rank, 25) == outcomes(range(1, 26))
