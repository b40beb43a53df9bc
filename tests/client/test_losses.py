"""What is lost, doubled, late or garbage on the way, and coordinators that change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.client import ClientSettings, RankState
from coordinator.errors import (
    NotReadyError,
)
from coordinator.messages import (
    Broadcast,
    Open,
    Outcome,
    WhoAreYou,
)
from tests.client.peer import Peer, drain_until, outcomes
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.client.conftest import Connect


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
        eventually(lambda room=room: peer.groups["prefill"].published == room, 10, "published")  # type: ignore[misc]
    assert drain_until(rank, 4) == outcomes([1, 2, 3, 4])
    assert lost == [2, 4]
    eventually(lambda: peer.acknowledged("prefill") == 4, 10, "the acknowledgement")
    assert not rank.drain()


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
    eventually(lambda: first.state is RankState.JOINED, 10, "joined")
    peer.publish("prefill", *outcomes([1, 2]))
    late = connect(peer.control, 1, 2)
    assert drain_until(late, 2) == outcomes([1, 2])
    assert drain_until(first, 2) == outcomes([1, 2])


def test_a_coordinator_that_comes_back_is_joined_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([1, 2]))
    assert drain_until(rank, 2) == outcomes([1, 2])
    old = rank.head

    peer.stop()
    eventually(lambda: rank.state is RankState.COORDINATOR_AWAY, 10, "away")
    rank.open(7)
    with pytest.raises(NotReadyError, match="is away"):
        rank.wait_ready(0.01)
    peer.restart(epoch=8)
    rank.wait_ready(10)

    eventually(lambda: peer.items("prefill") == [Open(7, 2)], 10, "the room, said to the new coordinator")
    assert peer.hellos[-1].epoch == 7
    assert peer.hellos[-1].acknowledged == 2
    peer.publish("prefill", *outcomes([3]))
    assert drain_until(rank, 1) == outcomes([3])
    assert not rank.drain(through=old)
    rank.open(8)
    eventually(lambda: peer.items("prefill") == [Open(7, 2), Open(8, 3)], 10, "numbers go on")


def test_a_coordinator_that_was_replaced_at_once_is_joined_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.restart(epoch=8)
    rank.open(7)
    eventually(lambda: peer.items("prefill") == [Open(7, 0)], 10, "the room, said to the new coordinator")
    rank.wait_ready(10)


def test_a_rank_that_was_forgotten_introduces_itself_again(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.open(1)
    eventually(lambda: len(peer.items("prefill")) == 1, 10, "one item")
    peer.forget()
    rank.open(2)
    eventually(lambda: len(peer.hellos) == 2, 10, "another Hello")
    eventually(lambda: peer.items("prefill") == [Open(1, 0), Open(2, 0)], 10, "both, once")


def test_unknown_epochs_and_unasked_questions_change_nothing_for_the_engine(
    peer: Peer, connect: Connect
) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.say("prefill", 0, WhoAreYou(7))
    eventually(lambda: len(peer.hellos) == 2, 10, "another Hello")
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
    eventually(lambda: rank._io.malformed == 5, 10, "five dropped frames")
    peer.publish("prefill", *outcomes([1]))
    assert drain_until(rank, 1) == outcomes([1])


def test_silence_is_noticed_and_healed(peer: Peer, connect: Connect) -> None:
    """Case C42: the sockets are there, but nothing comes through them; they are made anew."""
    settings = ClientSettings(away_after_s=0.3, hello_retry_s=0.05)
    rank = connect(peer.control, settings=settings)
    rank.wait_ready(10)
    peer.drop = lambda _: True
    peer.deaf = True
    eventually(lambda: rank.state is RankState.COORDINATOR_AWAY, 10, "away")
    rank.open(1)
    eventually(lambda: rank._conversation.connections >= 2, 10, "new sockets")
    peer.drop = lambda _: False
    peer.deaf = False
    rank.wait_ready(10)
    eventually(lambda: peer.items("prefill") == [Open(1, 0)], 10, "what was said meanwhile")


def test_an_engine_that_never_drains_holds_up_only_itself(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control, settings=ClientSettings(undrained_events=10))
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes(range(1, 26)))
    eventually(lambda: peer.acknowledged("prefill") == 10, 10, "as much as fits")
    beats = len(peer.submits)
    eventually(lambda: len(peer.submits) > beats + 2, 10, "two more heartbeats")
    assert peer.acknowledged("prefill") == 10
    assert drain_until(rank, 25) == outcomes(range(1, 26))
