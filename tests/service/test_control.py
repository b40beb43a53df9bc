"""The control socket: what comes in is validated, counted and answered, and harms nobody else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import (
    MAX_FRAME_BYTES,
    VERSION,
    Bye,
    Cancel,
    Item,
    MoveDone,
    Open,
    Outcome,
    Refused,
    Reports,
    Resend,
    Role,
    Send,
    Submit,
    WhoAreYou,
    WorkerHello,
    decode_to_rank,
    encode,
)
from tests.service.peers import Peer, RankPeer, hello, pages
from tests.service.stage import Stage, config, now_s, turns
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.messages import ToRank


async def answer(peer: Peer) -> ToRank:
    """Wait for the next answer."""
    await eventually_async(lambda: peer.answers, what="an answer")
    return decode_to_rank(peer.answers.pop(0))


async def malformed(stage: Stage, count: int) -> None:
    """Wait until the coordinator has counted this many."""
    await eventually_async(lambda: stage.service.counters.malformed == count)


def stranger(stage: Stage) -> Peer:
    """A peer that has not introduced itself."""
    peer = Peer(stage)
    peer.open()
    return peer


# --- frames that are no messages -------------------------------------------------------------

GARBAGE = {
    "nothing": [b""],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "another type": [encode({"a": 1})],
    "an unknown tag": [encode(["goodbye", 1])],
    "a message to us from us": [encode(Refused("a", "b"))],
    "half a message": [encode(Bye("why"))[:-2]],
    "a message and more": [encode(Bye("why")) + b"\0"],
    "a null room": [encode(Submit(1, 1, 0, 0, True, [Open(0, 0)]))],  # noqa: FBT003 - a field of the message
    "deep nesting": [b"\x91" * 100_000],
    "two frames": [encode(Bye()), b""],
    "many frames": [b""] * 1000,
    "an empty one before": [b"", encode(Bye())],
    "over the bound": [b"\0" * (MAX_FRAME_BYTES + 1)],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_counted_and_answered_and_the_next_message_is_served(frames: list[bytes]) -> None:
    """Case C39. A null id is no room (case C35)."""
    async with Stage() as stage:
        rank = RankPeer(stage, Role.DECODE, "d", 0, 1)
        rank.open()
        with capture() as log:
            rank.send(*frames)
            refused = await rank.refused()
            rank.send(rank.hello)
            await eventually_async(lambda: rank.welcomed)
        assert refused.code == "malformed"
        assert not refused.fatal
        assert len(refused.message) < 500
        assert stage.service.counters.malformed == 1
        assert [line["error"] for line in log.of("control.malformed")] == [refused.message]
        rank.cancel(7)
        assert await rank.failure(7) == "cancelled_by_decode"


async def test_a_flood_of_garbage_is_few_lines_and_holds_up_nobody() -> None:
    async with Stage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        flood = stranger(stage)
        with capture() as log:
            for number in range(2000):
                flood.send(number.to_bytes(8, "little"))
            asked_s = now_s()
            rank.cancel(7)
            await rank.outcome(7)
            assert now_s() - asked_s < 1.0
            await eventually_async(lambda: stage.service.counters.malformed == 2000)
        assert len(log.of("control.malformed")) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_broken_messages_never_reach_the_loop_as_errors(seed: int) -> None:
    """Case C39: valid messages with some bytes changed, cut off or put in."""
    source = random.Random(seed)
    async with Stage() as stage:
        unknown, rank, worker = stranger(stage), stranger(stage), stranger(stage)
        rank.send(hello(stage, Role.PREFILL, "p", 0, 1))
        await eventually_async(lambda: stage.service.transfers.crews)
        (crew,) = stage.service.transfers.crews.values()
        worker.send(WorkerHello(VERSION, crew.worker.token, 1))
        items: list[Item] = [Open(2, 0), Send(2, 0, pages(1, 2), last=True, aux=b"aux"), Cancel(3, 0, "why")]
        valid = [
            encode(Submit(stage.service.epoch, 1, 0, 0, True, items)),  # noqa: FBT003 - a field of the message
            encode(hello(stage, Role.DECODE, "d", 0, 1)),
            encode(hello(stage, Role.PREFILL, "p", 0, 1)),
            encode(Reports([MoveDone(1, 1, 1.0)])),
            encode(WorkerHello(VERSION, b"t" * 32, 1)),
            encode(Bye("why")),
        ]
        for _ in range(1500):
            source.choice([unknown, rank, worker]).send(broken(source, source.choice(valid)))
        await turns(200)
        good = (await stage.group(Role.DECODE, "good", 1))[0]
        good.cancel(7)
        assert await good.failure(7) == "cancelled_by_decode"
        assert not stage.bugs, f"seed {seed}: {stage.bugs}"


def broken(source: random.Random, frame: bytes) -> bytes:
    """Change, cut off or insert a few bytes."""
    data = bytearray(frame)
    for _ in range(source.randint(1, 3)):
        place = source.randrange(len(data) + 1)
        match source.randrange(4):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = source.randbytes(source.randint(1, 4))
            case _ if place < len(data):
                data[place] = source.randrange(256)
    return bytes(data)


# --- who speaks ------------------------------------------------------------------------------


async def test_another_version_is_refused_naming_both() -> None:
    async with Stage() as stage:
        peer = stranger(stage)
        peer.send(hello(stage, Role.DECODE, "d", 0, 1, version=99))
        refused = await peer.refusal()
        assert refused.message == f"protocol version 99 is not spoken here; this coordinator speaks {VERSION}"
        assert refused.fatal
        peer.send(encode(["hello", 99, "fields of another version"]))
        assert "protocol version 99" in (await peer.refusal()).message
        peer.send(WorkerHello(99, b"t" * 32, 1))
        assert (await peer.refusal()).message == f"worker speaks protocol 99, this coordinator {VERSION}"


async def test_a_stranger_and_a_rank_of_another_epoch_are_asked_who_they_are() -> None:
    async with Stage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        peer = stranger(stage)
        peer.send(Submit(rank.epoch, 1, 0, 0, False, [Cancel(7, 0)]))  # noqa: FBT003 - a field of the message
        assert await answer(peer) == WhoAreYou(rank.epoch)
        assert stage.service.counters.opened == 0
        # A rank that knows another epoch than ours, and is known to us.
        greeted = rank.welcomed
        rank.send(Submit(rank.epoch + 1, 1, 0, 0, True, [Cancel(7, 0)]))  # noqa: FBT003 - as above
        await eventually_async(lambda: rank.welcomed > greeted)
        assert stage.service.counters.opened == 0


async def test_the_goodbye_of_a_stranger_is_nothing() -> None:
    async with Stage() as stage:
        await stage.group(Role.DECODE, "d", 1)
        stranger(stage).send(Bye("who?"))
        await turns()
        assert stage.service.counters.ranks_lost == 0


async def test_reports_of_a_stranger_are_refused() -> None:
    async with Stage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        move = await worker.move()
        peer = stranger(stage)
        peer.send(WorkerHello(VERSION, b"guess" * 6, 1))
        assert (await peer.refusal()).message == "a worker with an unknown token"
        peer.send(Reports([MoveDone(move.move, 1, 1.0)]))
        assert (await peer.refusal()).message == "reports of an unknown worker"
        # A rank is no worker either.
        decode[0].send(Reports([MoveDone(move.move, 1, 1.0)]))
        assert (await decode[0].refused()).message == "reports of an unknown worker"
        assert 7 in stage.service.rooms.active
        worker.done(move)
        assert (await decode[0].outcome(7)).succeeded


async def test_a_former_life_of_a_worker_is_not_heard() -> None:
    async with Stage() as stage:
        prefill, decode, (former,) = await stage.pair(auto=False)
        token = former.worker.token
        stage.worker(prefill[0]).die()
        (worker,) = await stage.workers(auto=False)
        worker.connect_all()
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        move = await worker.move()
        with capture():
            former.report(MoveDone(move.move, 1, 1.0))
            former.send(WorkerHello(VERSION, token, 1))
            await eventually_async(lambda: stage.service.counters.malformed == 2)
        assert 7 in stage.service.rooms.active
        assert worker.worker.identity == worker.identity
        worker.done(move)
        assert (await decode[0].outcome(7)).succeeded


async def test_a_rank_that_comes_back_under_another_identity_has_one_session() -> None:
    async with Stage(config(rank={"heartbeat_s": 0.1, "lost_after_s": 0.5})) as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        before = len(stage.service.control._sessions)
        lines = [stranger(stage) for _ in range(5)]
        for line in lines:
            line.send(rank.hello)
            await answer(line)
        assert len(stage.service.control._sessions) == before
        lines[0].answers.clear()
        lines[0].send(Submit(rank.epoch, 1, 0, 0, True, [Cancel(7, 0)]))  # noqa: FBT003 - a field
        assert await answer(lines[0]) == WhoAreYou(rank.epoch)
        rank.stop()
        await eventually_async(lambda: stage.service.counters.ranks_lost == 1)
        assert len(stage.service.control._sessions) == before - 1
        lines[-1].answers.clear()
        lines[-1].send(Submit(rank.epoch, 1, 0, 0, True, [Cancel(7, 0)]))  # noqa: FBT003 - a field
        assert await answer(lines[-1]) == WhoAreYou(rank.epoch)
        assert stage.service.counters.opened == 0


# --- numbers ---------------------------------------------------------------------------------


async def test_items_that_come_twice_count_once_and_a_gap_is_asked_for() -> None:
    """Case C05, in the other direction."""
    async with Stage() as stage:
        peer = stranger(stage)
        peer.send(hello(stage, Role.DECODE, "d", 0, 1))
        await eventually_async(lambda: peer.answers)
        peer.answers.clear()
        epoch = stage.service.epoch

        def submit(first: int, *rooms: int) -> None:
            items: list[Item] = [Cancel(room, 0, f"item of room {room}") for room in rooms]
            peer.send(Submit(epoch, first, 0, 0, False, items))  # noqa: FBT003 - a field of the message

        counters = stage.service.counters
        submit(1, 1, 2)
        submit(1, 1, 2)
        submit(2, 2, 3)
        submit(1, 1, 2, 3)
        await eventually_async(lambda: counters.opened == 3)
        submit(6, 6)
        assert await answer(peer) == Resend(3)
        submit(9)  # a sign of life tells of a gap, too
        assert await answer(peer) == Resend(3)
        submit(4, 4, 5, 6)
        submit(6, 6, 7)
        await eventually_async(lambda: counters.opened == 7)
        await turns()
        member = stage.service.membership.groups["d"].ranks[0]
        assert member is not None
        assert member.received == 7
        assert counters.opened == 7
        assert counters.malformed == 0
        assert not peer.answers


@pytest.mark.parametrize(("acknowledged", "applied"), [(5, 0), (0, 5), (2**62, 2**62)])
async def test_an_acknowledgement_of_what_was_never_told_is_refused(acknowledged: int, applied: int) -> None:
    async with Stage() as stage:
        first, second = await stage.group(Role.DECODE, "d", 2)
        first.send(
            Submit(first.epoch, 1, acknowledged, applied, True, [Cancel(7, 0)])  # noqa: FBT003 - a field
        )
        refused = await first.refused()
        assert refused.code == "malformed"
        assert stage.service.counters.opened == 0
        second.cancel(7)
        for rank in (first, second):
            assert await rank.failure(7) == "cancelled_by_decode"
            assert rank.when(Outcome, 7)


async def test_the_highest_numbers_are_no_obstacle() -> None:
    async with Stage() as stage:
        rank = RankPeer(stage, Role.DECODE, "d", 0, 1, instance=2**64 - 1)
        await rank.join()
        rank.submit(Cancel(2**64 - 1, 2**62))
        assert await rank.failure(2**64 - 1) == "cancelled_by_decode"


async def test_an_item_that_breaks_the_coordinator_harms_no_other_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug of ours: it reaches the loop's handler, and the reader goes on."""
    async with Stage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        with monkeypatch.context() as patch:
            patch.setattr(stage.service.control._items, "handle", lambda *_: 1 / 0)
            rank.cancel(7)
            await eventually_async(lambda: stage.bugs)
        assert isinstance(stage.bugs.pop()["exception"], ZeroDivisionError)
        rank.cancel(8)
        assert await rank.failure(8) == "cancelled_by_decode"


async def test_a_peer_that_reads_nothing_holds_up_nobody() -> None:
    """Case C14: its answers are dropped when its queue is full."""
    async with Stage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        deaf = Peer(stage)
        deaf.socket.connect(stage.config.listen.control[0])
        for number in range(1, 13_001):
            deaf.send(b"garbage")
            if number % 500 == 0:
                await malformed(stage, number)
        assert not stage.service.control.channel.send([deaf.identity, b"one more"])
        rank.cancel(7)
        assert await rank.failure(7) == "cancelled_by_decode"
