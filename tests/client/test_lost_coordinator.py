"""Ranks over real sockets whose coordinator stays away; it is a small one that the test commands."""

from __future__ import annotations

import select
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import pytest

from backends.base import BackendError
from backends.loopback import LoopbackBackend
from coordinator.client import (
    ClientSettings,
    DecodeRank,
    Endpoint,
    KVPool,
    Outcome,
    PrefillRank,
    RankState,
    Reason,
    Released,
)
from coordinator.client.token import Token
from coordinator.errors import NotReadyError
from coordinator.messages import Offer, Open, Refused
from coordinator.worker.memory import MappedPool
from tests.client.peer import LAYOUT, Peer, outcomes
from tests.client.steps import step
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from coordinator.client.rank import Rank
    from coordinator.messages import Event

pytestmark = pytest.mark.usefixtures("short_hold")

SETTINGS = ClientSettings(
    coordinator_lost_s=0.6, away_after_s=0.3, hello_retry_s=0.05, lockstep_wait_s=5.0, resend_after_s=0.5
)
R = TypeVar("R", bound="Rank")


def prefill(
    stack: ExitStack, peer: Peer, size: int = 2, settings: ClientSettings = SETTINGS
) -> list[PrefillRank]:
    """Join the ranks of an engine, each with a pool of its own."""
    ranks = []
    for rank in range(size):
        pool = stack.enter_context(KVPool.allocate(LAYOUT, 16, size))
        connected = PrefillRank.connect(
            peer.control, group="p", rank=rank, world_size=size, pool=pool, settings=settings
        )
        ranks.append(stack.enter_context(connected))
    return ready(ranks)


def decode(stack: ExitStack, peer: Peer, endpoint: Endpoint, group: str = "d") -> DecodeRank:
    """Join an engine of one rank."""
    connected = DecodeRank.connect(
        peer.control, group=group, rank=0, world_size=1, endpoint=endpoint, settings=SETTINGS
    )
    return ready([stack.enter_context(connected)])[0]


def endpoint(stack: ExitStack) -> Endpoint:
    pool = stack.enter_context(KVPool.allocate(LAYOUT, 16))
    return stack.enter_context(Endpoint(pool, backend="loopback"))


def ready(ranks: list[R]) -> list[R]:
    for rank in ranks:
        rank.wait_ready(10)
    return ranks


def steps_until(ranks: Sequence[Rank], count: int, timeout_s: float = 10.0) -> list[list[Event]]:
    """Make steps until there are ``count`` events; return those of each step that had any."""
    found: list[list[Event]] = []
    deadline_s = time.monotonic() + timeout_s
    while sum(map(len, found)) < count:
        assert ranks[0].wait(deadline_s - time.monotonic()), f"only {found}"
        events = step(ranks)
        found += [events] if events else []
    return found


def joined(steps: list[list[Event]]) -> list[Event]:
    return [event for events in steps for event in events]


def reasons(events: Sequence[Event]) -> dict[int, Reason | None]:
    """Why each room has failed."""
    return {
        event.room: event.failure.reason if event.failure is not None else None
        for event in events
        if isinstance(event, Outcome)
    }


def test_all_rooms_fail_in_one_step_and_their_pages_come_back(peer: Peer, stack: ExitStack) -> None:
    """Case C24: the coordinator's node is gone."""
    ranks = prefill(stack, peer)
    for rank in ranks:
        for room in (3, 1, 2):
            rank.send(room, [room], last=True)
    eventually(lambda: all(len(peer.items("p", number)) == 3 for number in range(2)), 10, "all is heard")
    peer.publish("p", Outcome(2, 1))
    assert steps_until(ranks, 1) == [[Outcome(2, 1)]]
    peer.stop()
    # Said while nobody hears it.
    for rank in ranks:
        rank.open(9)
    failed, released = steps_until(ranks, 7)
    assert [event.room for event in failed] == [1, 3, 9]
    assert set(reasons(failed).values()) == {Reason.COORDINATOR_LOST}
    assert released == [Released(1, 1), Released(2, 1), Released(3, 1), Released(9, 1)]
    assert [rank.state for rank in ranks] == [RankState.CONNECTING] * 2
    assert [rank.unreleased for rank in ranks] == [0, 0]


def test_a_rank_that_stood_still_does_not_take_that_for_its_coordinator_s_absence(
    peer: Peer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for longer than a coordinator may be away, and nothing lies in its sockets yet."""
    patient = ClientSettings(away_after_s=5.0, coordinator_lost_s=8.0)
    (rank,) = prefill(stack, peer, 1, patient)
    rank.send(1, [1], last=True)
    eventually(lambda: peer.items("p"), 10, "it is heard")
    goes_on = threading.Event()
    stack.callback(goes_on.set)
    peer.call(goes_on.wait)
    still = SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0)
    monkeypatch.setattr("coordinator.client.clock.time", still)
    rank.open(2)  # which wakes it up
    eventually(lambda: rank._io._clock.now_s() < still.monotonic() - 90.0, 10, "it has noticed")
    assert rank.state is RankState.READY
    assert not rank.drain()
    goes_on.set()
    eventually(lambda: len(peer.items("p")) == 2, 10, "it goes on")
    peer.publish("p", Outcome(1, 1), Released(1, 1))
    assert joined(steps_until([rank], 2)) == [Outcome(1, 1), Released(1, 1)]
    assert rank.state is RankState.READY


def test_the_next_coordinator_serves_what_was_said_after_the_loss(peer: Peer, stack: ExitStack) -> None:
    ranks = prefill(stack, peer)
    for rank in ranks:
        rank.open(1)
    eventually(lambda: all(peer.items("p", number) for number in range(2)), 10, "it is heard")
    former = {hello.instance for hello in peer.hellos}
    peer.stop()
    steps_until(ranks, 2)
    for rank in ranks:
        rank.open(5)
    hellos = len(peer.hellos)
    peer.restart(8)
    ready(ranks)
    eventually(lambda: all(peer.items("p", number) for number in range(2)), 10, "it is heard")
    assert [peer.items("p", number) for number in range(2)] == [[Open(5, 0)]] * 2
    lives = set()
    for hello in peer.hellos[hellos:]:
        assert hello.instance not in former
        assert (hello.epoch, hello.memory) == (0, None)
        lives.add(hello.life)
    assert len(lives) == 1
    peer.publish("p", Outcome(5, 1), Released(5, 1))
    # Attempt 1 of some room was lost with the former coordinator.
    assert joined(steps_until(ranks, 2)) == [Outcome(5, 2), Released(5, 2)]


def test_a_coordinator_that_returns_just_before_is_not_lost(peer: Peer, stack: ExitStack) -> None:
    settings = ClientSettings(coordinator_lost_s=2.0, away_after_s=0.3, hello_retry_s=0.05)
    ranks = prefill(stack, peer, settings=settings)
    for rank in ranks:
        rank.open(1)
    eventually(lambda: all(peer.items("p", number) for number in range(2)), 10, "it is heard")
    peer.stop()
    eventually(lambda: all(rank.state is RankState.COORDINATOR_AWAY for rank in ranks), 10, "away")
    with pytest.raises(NotReadyError, match="is away; its return is awaited for 2 s"):
        ranks[0].wait_ready(1.0)
    peer.restart(8)
    ready(ranks)
    peer.publish("p", *outcomes([1]))
    assert steps_until(ranks, 1) == [[Outcome(1, 1)]]
    assert all(hello.life == 0 for hello in peer.hellos)


def test_pages_that_a_worker_still_has_are_held(peer: Peer, stack: ExitStack) -> None:
    """Case C16: the coordinator was only cut off, and one of its workers lives on."""
    ranks = prefill(stack, peer)
    pools = [rank._io._prover._proof for rank in ranks]
    held = MappedPool(pools[1]._path, pools[1]._size_bytes, 4711)  # type: ignore[attr-defined]
    for rank in ranks:
        rank.send(1, [1], last=True)
    peer.stop()
    (failed,) = steps_until(ranks, 1)
    assert reasons(failed) == {1: Reason.COORDINATOR_LOST}
    token = ranks[0].head
    while not Token.unpack(token).quiet:
        assert all(list(rank.drain(through=token)) == [] for rank in ranks)
        assert ranks[0].wait(10), "rank 0 has its proof"
        token = ranks[0].head
    # A rank that lacks its own waits for it, and then says so.
    ranks[1]._settings = ClientSettings(lockstep_wait_s=0.05)
    with pytest.raises(NotReadyError, match=r"p/1 holds the pages of 1 handoffs .* not proven"):
        ranks[1].drain(through=token)
    assert ranks[1].unreleased == 1
    ranks[1]._settings = SETTINGS
    held.close()
    assert list(ranks[1].drain(through=token)) == [Released(1, 1)]
    assert list(ranks[0].drain(through=token)) == [Released(1, 1)]


def test_without_lockstep_each_rank_goes_by_itself(peer: Peer, stack: ExitStack) -> None:
    ranks = prefill(stack, peer)
    for rank in ranks:
        rank.open(4)
    peer.stop()
    for rank in reversed(ranks):
        events: list[Event] = []
        while len(events) < 2:
            assert rank.wait(10)
            events += rank.drain()
        assert reasons(events) == {4: Reason.COORDINATOR_LOST}
        assert events[1:] == [Released(4, 1)]


def test_an_engine_that_sleeps_is_woken(peer: Peer, stack: ExitStack) -> None:

    (rank,) = prefill(stack, peer, 1)
    rank.open(4)
    eventually(lambda: peer.items("p"), 10, "it is heard")
    step([rank])
    rank.drain()
    assert select.select([rank], [], [], 0)[0] == []
    peer.stop()
    assert select.select([rank], [], [], 10)[0] == [rank]
    found: list[Event] = []
    while len(found) < 2:
        assert select.select([rank], [], [], 10)[0] == [rank]
        found += step([rank])
    assert found[1:] == [Released(4, 1)]


def test_decode_renews_its_endpoint_and_tells_the_other_coordinators(peer: Peer, stack: ExitStack) -> None:
    """Case C16: a worker of the lost one may live anywhere; those of the others must find us again."""
    shared = endpoint(stack)
    before = shared.address
    with Peer(peer_directory(stack)) as other:
        lost, well = decode(stack, peer, shared), decode(stack, other, shared, "e")
        lost.offer(1, [3])
        well.offer(2, [4])
        eventually(lambda: peer.items("d") and other.items("e"), 10, "both are heard")
        hellos = len(other.hellos)
        peer.stop()
        events = joined(steps_until([lost], 2))
        assert reasons(events) == {1: Reason.COORDINATOR_LOST}
        assert events[1:] == [Released(1, 1)]
        assert shared.renewals == 1
        assert shared.address != before
        eventually(lambda: len(other.hellos) > hellos, 10, "it is told")
        hello = other.hellos[-1]
        assert hello.endpoint == shared.address
        assert (hello.instance, hello.epoch, hello.life) == (other.hellos[0].instance, other.epoch, 0)
        other.publish("e", *outcomes([2]))
        assert steps_until([well], 1) == [[Outcome(2, 1)]]
        assert well.state is RankState.READY
        peer.restart(9)
        ready([lost])
        assert peer.hellos[-1].endpoint == shared.address
        lost.offer(1, [3])
        eventually(lambda: peer.items("d") == [Offer(1, 0, b"\3\0\0\0")], 10, "it is heard")


def test_each_loss_renews_the_endpoint_anew(peer: Peer, stack: ExitStack) -> None:
    """What was proven after the one says nothing of the workers of the next."""
    shared = endpoint(stack)
    rank = decode(stack, peer, shared)
    for losses in (1, 2):
        rank.offer(losses, [3])
        eventually(lambda: peer.items("d"), 10, "it is heard")
        peer.stop()
        events = joined(steps_until([rank], 2))
        assert [(event.room, type(event)) for event in events] == [(losses, Outcome), (losses, Released)]
        assert shared.renewals == losses
        peer.restart(8 + losses)
        ready([rank])


def peer_directory(stack: ExitStack) -> Path:
    return Path(stack.enter_context(TemporaryDirectory(prefix="t-")))


def test_nothing_is_renewed_for_a_coordinator_that_had_nothing_of_ours(peer: Peer, stack: ExitStack) -> None:
    shared = endpoint(stack)
    rank = decode(stack, peer, shared)
    rank.offer(1, [3])
    eventually(lambda: peer.items("d"), 10, "it is heard")
    peer.publish("d", Outcome(1, 1), Released(1, 1))
    steps_until([rank], 2)
    peer.stop()
    eventually(lambda: Token.unpack(rank.head).lost, 10, "the coordinator is lost")
    assert step([rank]) == []
    peer.restart(9)
    ready([rank])
    assert (peer.hellos[-1].life, shared.renewals) == (1, 0)


def test_an_endpoint_that_cannot_be_renewed_is_not_introduced(
    peer: Peer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are held, and the engine can see it; it is tried again."""
    monkeypatch.setattr("coordinator.client.prover._RETRY_S", 2.0)
    shared = endpoint(stack)
    rank = decode(stack, peer, shared)
    rank.offer(1, [3])
    tries: list[str] = []
    start = LoopbackBackend.start

    def fail(self: LoopbackBackend, *, sends: bool) -> None:
        tries.append(self.agent)
        if len(tries) < 3:
            message = "no more ports"
            raise BackendError(message)
        start(self, sends=sends)

    monkeypatch.setattr(LoopbackBackend, "start", fail)
    peer.stop()
    (failed,) = steps_until([rank], 1)
    assert reasons(failed) == {1: Reason.COORDINATOR_LOST}
    peer.restart(9)
    hellos = len(peer.hellos)
    eventually(lambda: len(tries) == 1, 10, "a try")
    eventually(lambda: rank._io._sleeping, 10, "the thread sleeps until the next")
    assert rank._io._due_s() > time.monotonic() - 0.1
    eventually(lambda: len(tries) == 2, 10, "two tries")
    assert len(peer.hellos) == hellos
    assert rank.unreleased == 1
    assert not rank.drain()
    assert steps_until([rank], 1) == [[Released(1, 1)]]
    eventually(lambda: len(peer.hellos) > hellos, 10, "it is introduced")
    assert peer.hellos[hellos].endpoint == shared.address


def test_a_refusal_for_now_is_an_absence_too(peer: Peer, stack: ExitStack) -> None:
    """A coordinator that lives and does not take the rank back."""
    ranks = prefill(stack, peer)
    for rank in ranks:
        rank.open(1)
    peer.refusal = Refused("full", "too many groups")
    peer.forget()
    (failed,) = steps_until(ranks, 1)
    assert reasons(failed) == {1: Reason.COORDINATOR_LOST}


def test_what_arrives_late_changes_nothing(peer: Peer, stack: ExitStack) -> None:
    """Case C24: the coordinator was there all along, and answers when it is over."""
    ranks = prefill(stack, peer)
    for rank in ranks:
        rank.open(1)
    eventually(lambda: all(peer.items("p", number) for number in range(2)), 10, "it is heard")
    peer.drop = lambda _: True
    peer.deaf = True
    (failed,) = steps_until(ranks, 1)
    assert reasons(failed) == {1: Reason.COORDINATOR_LOST}
    # It has all that was said to it meanwhile, and gives its verdict.
    peer.publish("p", Outcome(1, 1), Released(1, 1))
    peer.drop = lambda _: False
    peer.deaf = False
    assert steps_until(ranks, 1) == [[Released(1, 1)]]
    ready(ranks)
    for rank in ranks:
        rank.open(1)
    eventually(lambda: all(peer.items("p", number) for number in range(2)), 10, "it is heard")
    peer.publish("p", Outcome(1, 1), Released(1, 1))
    assert joined(steps_until(ranks, 2)) == [Outcome(1, 2), Released(1, 2)]
