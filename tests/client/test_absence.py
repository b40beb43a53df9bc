"""Coordinators that are absent, not ready, or refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.client import ClientSettings, RankState
from coordinator.errors import (
    ConfigError,
    NotReadyError,
    QueueFullError,
    RefusedError,
)
from coordinator.messages import (
    Open,
    Refused,
)
from tests.client.peer import Peer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.client.conftest import Connect


def test_a_group_that_is_not_complete_is_named(peer: Peer, connect: Connect) -> None:
    """Case C41: the error says what the coordinator waits for."""
    rank = connect(peer.control, 0, 2)
    eventually(lambda: rank.state is RankState.JOINED, 10, "joined")
    with pytest.raises(NotReadyError, match=r"prefill/0 is not ready after 0.01 s.*waits for other ranks"):
        rank.wait_ready(0.01)
    peer.say("prefill", 0, Refused("not_ready", "prefill/1 is missing"))
    eventually(
        lambda: "prefill/1 is missing" in rank._conversation.standing.explain(), 10, "the coordinator's word"
    )
    with pytest.raises(NotReadyError, match="it said: prefill/1 is missing"):
        rank.wait_ready(0.01)


def test_a_refusal_of_one_call_is_told_to_this_rank(peer: Peer, connect: Connect) -> None:
    """Case C35: the newcomer hears it."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    assert rank.refusals() == []
    refused = Refused("room_active", "room 5 is being handed over already", room=5)
    rank.drain()
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
    eventually(lambda: len(peer.hellos) >= 2, 10, "another try")
    with pytest.raises(NotReadyError, match="about to stop"):
        rank.wait_ready(0.01)
    peer.refusal = None
    rank.wait_ready(10)


def test_an_absent_coordinator_is_visible_and_the_queue_is_bounded(short_dir: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{short_dir}/nobody", settings=ClientSettings(queue_items=100))
    for room in range(1, 101):
        rank.open(room)
    with pytest.raises(QueueFullError, match=r"100 calls .* no coordinator at ipc://.* has accepted"):
        rank.open(101)
    assert rank.state is RankState.CONNECTING
    assert not rank.drain()
    with pytest.raises(NotReadyError, match=r"no coordinator at ipc://.*/nobody has accepted"):
        rank.wait_ready(0.01)


def test_the_queue_is_bounded_in_bytes(short_dir: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{short_dir}/nobody", settings=ClientSettings(queue_bytes=10_000))
    for room in range(1, 10):
        rank.send(room, [1], last=True, aux=b"x" * 1000)
    with pytest.raises(QueueFullError, match=r"9 calls with 9\d+ bytes"):
        rank.send(10, [1], last=True, aux=b"x" * 1000)
    rank.open(10)


def test_what_was_said_before_the_coordinator_came_is_heard(short_dir: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{short_dir}/control")
    for room in range(1, 2001):
        rank.open(room)
    with Peer(short_dir) as peer:
        eventually(lambda: len(peer.items("prefill")) == 2000, 10, "all items")
        assert peer.items("prefill") == [Open(room, 0) for room in range(1, 2001)]
        eventually(lambda: len(rank._conversation.outbox) == 0, 10, "all confirmed")


def test_an_address_that_cannot_be_subscribed_to_is_told(short_dir: Path, connect: Connect) -> None:
    """Case C33."""
    with Peer(short_dir, outcomes="tcp://*:notaport") as peer:
        rank = connect(peer.control)
        with pytest.raises(RefusedError, match=r"subscribe to 'tcp://\*:notaport'.*correct the address"):
            rank.wait_ready(10)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://host", "ftp://host:1"])
def test_an_address_that_cannot_be_used_is_refused_at_once(connect: Connect, address: str) -> None:
    with pytest.raises(ConfigError, match=r"address: .* cannot be used"):
        connect(address)
