"""Prefill engines that move the pages by themselves: their ranks tell how it ended."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import pytest

from coordinator.messages import (
    EXTERNAL,
    Cancel,
    Held,
    LegDone,
    LegFailed,
    LegQuiet,
    Memory,
    Outcome,
    Role,
    Unreleased,
)
from coordinator.reasons import Failure, Reason
from tests.service.peers import RankPeer
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.config import Config
    from coordinator.messages import Item

pytestmark = virtual_time

DEADLINE_S: Final = 20.0
UNPROVEN_S: Final = 50.0


def own(**sections: dict[str, object]) -> Config:
    """The configuration of a coordinator for such engines."""
    bounds: dict[str, dict[str, object]] = {"handoff": {"deadline_s": DEADLINE_S}}
    return config(backend={"name": EXTERNAL}, **(bounds | sections))


@asynccontextmanager
async def engine(world_size: int) -> AsyncIterator[tuple[VirtualStage, list[RankPeer]]]:
    """Such a coordinator, and an engine ``p`` that is ready."""
    async with VirtualStage(own()) as stage:
        yield stage, await stage.group(Role.PREFILL, "p", world_size)


def leg_done(rank: RankPeer, room: int) -> None:
    rank.submit(LegDone(room, rank.applied))


def leg_failed(rank: RankPeer, room: int, *, quiet: bool) -> None:
    rank.submit(LegFailed(room, rank.applied, "the link broke", quiet))


def leg_quiet(rank: RankPeer, room: int, attempt: int = 1) -> None:
    rank.submit(LegQuiet(room, rank.applied, attempt))


async def test_it_succeeds_when_all_ranks_are_complete_and_all_their_transfers_are_done() -> None:
    async with engine(2) as (stage, ranks):
        assert not stage.service.transfers.crews  # no worker is spawned
        for rank in ranks:
            rank.send_pages(7)
        leg_done(ranks[0], 7)
        await turns()
        assert not ranks[0].outcomes(7)
        leg_done(ranks[1], 7)
        for rank in ranks:
            assert (await rank.outcome(7)).succeeded
            await rank.release(7)
            rank.drain()
        await stage.empty()


async def test_a_transfer_that_ends_before_the_other_rank_is_complete_counts() -> None:
    async with engine(2) as (_, ranks):
        ranks[0].send_pages(7)
        leg_done(ranks[0], 7)
        await turns()
        ranks[1].send_pages(7)
        leg_done(ranks[1], 7)
        assert (await ranks[0].outcome(7)).succeeded


async def test_a_transfer_that_never_ends_fails_at_the_deadline_and_names_its_rank() -> None:
    async with engine(2) as (_, ranks):
        began_s = now_s()
        for rank in ranks:
            rank.send_pages(7)
        leg_done(ranks[0], 7)
        outcomes = [await rank.outcome(7) for rank in ranks]
        assert now_s() - began_s == pytest.approx(DEADLINE_S, abs=1.0)
        assert outcomes[0] == outcomes[1]
        failure = outcomes[0].failure
        assert failure is not None
        assert failure.reason == "deadline"
        assert failure.message == "waited 20.0 s after prefill for the engine's own transfer from p/1"


async def test_pages_are_released_when_every_rank_is_quiet_and_not_before() -> None:
    async with engine(2) as (stage, ranks):
        for rank in ranks:
            rank.send_pages(7)
        leg_failed(ranks[0], 7, quiet=False)
        for rank in ranks:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert (outcome.failure.reason, outcome.failure.origin) == ("transport", "p/0")
            assert outcome.failure.message == "the link broke"
            rank.drain()
        leg_quiet(ranks[1], 7)
        await turns()
        assert not ranks[0].released(7)
        leg_quiet(ranks[0], 7)
        for rank in ranks:
            await rank.release(7)
            rank.drain()
        await stage.empty()


async def test_a_rank_that_has_not_spoken_of_the_room_holds_its_pages_too() -> None:
    """It may be sending chunks of it already."""
    async with engine(2) as (_, ranks):
        ranks[0].send_pages(7)
        leg_failed(ranks[0], 7, quiet=True)
        assert await ranks[0].failure(7) == "transport"
        await turns()
        assert not ranks[0].released(7)
        leg_quiet(ranks[1], 7)
        await ranks[0].release(7)


async def left_open(stage: VirtualStage, room: int = 7) -> RankPeer:
    """An engine of one rank whose handoff has failed, and which does not say that the pages are quiet."""
    (rank,) = await stage.group(Role.PREFILL, "p", 1)
    await fails_open(rank, room)
    return rank


async def fails_open(rank: RankPeer, room: int) -> None:
    rank.send_pages(room)
    leg_failed(rank, room, quiet=False)
    await rank.outcome(room)


async def test_pages_that_are_not_proven_quiet_are_held_for_ever_and_an_operator_is_told() -> None:
    async with VirtualStage(own()) as stage:
        with capture("error") as log:
            rank = await left_open(stage)
            assert stage.service.overview.troubles() == []
            await asyncio.sleep(3600)
        assert not rank.released(7)
        (told,) = log.of("release.unquiet")
        assert (told["room"], told["ranks"], told["held_s"]) == (7, ["p/0"], 5.0)
        (trouble,) = stage.service.overview.troubles()
        assert trouble.startswith("1 failed handoffs hold pages that their engine does not say to be quiet, ")
        assert "room 7 of p" in trouble
        assert stage.service.quarantine.handoffs(10) == list(stage.service.rooms.unreleased)
        rank.drain()
        leg_quiet(rank, 7)
        await rank.release(7)
        rank.drain()
        await stage.empty()
        assert stage.service.overview.troubles() == []


async def test_an_engine_that_tells_in_time_is_no_trouble() -> None:
    """Neither when it is quiet within ``settle_s``, nor, after that, within the operator's bound."""
    async with VirtualStage(own(release={"unproven_s": UNPROVEN_S})) as stage:
        (rank,) = await stage.group(Role.PREFILL, "p", 1)
        for room, after_s, told in ((7, 1.0, 0), (8, 10.0, 1)):
            with capture("error") as log:
                await fails_open(rank, room)
                rank.drain()
                await asyncio.sleep(after_s)
                leg_quiet(rank, room)
                await rank.release(room)
                await asyncio.sleep(UNPROVEN_S)
            assert len(log.of("release.unquiet")) == told
            assert not log.of("release.unproven")
            rank.drain()
        await stage.empty()


async def test_an_operator_may_have_them_let_go_at_a_bound() -> None:
    async with VirtualStage(own(release={"unproven_s": UNPROVEN_S})) as stage:
        with capture("error") as log:
            rank = await left_open(stage)
            began_s = now_s()
            await rank.release(7)
        assert now_s() - began_s == pytest.approx(UNPROVEN_S, abs=1.0)
        assert log.of("release.unproven")[0]["ranks"] == ["p/0"]
        rank.drain()
        await stage.empty()
        assert stage.service.overview.troubles() == []


async def test_such_a_bound_can_be_set_while_they_are_held() -> None:
    async with VirtualStage(own()) as stage:
        rank = await left_open(stage)
        await asyncio.sleep(1000)
        stage.service.reconfigure(own(release={"unproven_s": 1100.0}))
        await turns()
        assert not rank.released(7)
        stage.service.reconfigure(own(release={"unproven_s": 900.0}))
        await turns()
        assert rank.released(7)


# --- which attempt a rank means ------------------------------------------------------------------


async def failed_twice(stage: VirtualStage) -> list[RankPeer]:
    """Two ranks whose room has failed, was used again, and has failed again; nothing is quiet."""
    ranks = await stage.group(Role.PREFILL, "p", 2)
    for attempt in (1, 2):
        for rank in ranks:
            rank.send_pages(7)
        leg_failed(ranks[0], 7, quiet=False)
        for rank in ranks:
            await rank.outcome(7, attempt)
        for rank in ranks:
            rank.drain()
        await turns()
    return ranks


@pytest.mark.parametrize("first", [1, 2])
async def test_two_attempts_of_a_room_are_released_each_by_the_words_about_it(first: int) -> None:
    """All ranks have drained both verdicts: nothing but the word itself can say which is meant."""
    second = 3 - first
    async with VirtualStage(own()) as stage:
        ranks = await failed_twice(stage)
        leg_quiet(ranks[0], 7, first)
        leg_quiet(ranks[1], 7, second)
        await turns()
        assert not ranks[0].released(7)
        leg_quiet(ranks[1], 7, first)
        await ranks[0].release(7, first)
        assert [released.attempt for released in ranks[0].released(7)] == [first]
        leg_quiet(ranks[0], 7, second)
        await ranks[1].release(7, second)


async def test_a_word_about_an_attempt_that_is_quiet_counts_for_no_other() -> None:
    async with engine(1) as (_, (rank,)):
        rank.send_pages(7)
        leg_failed(rank, 7, quiet=True)
        await rank.release(7)
        rank.drain()
        rank.send_pages(7)
        leg_failed(rank, 7, quiet=False)
        await rank.outcome(7, 2)
        rank.drain()
        leg_quiet(rank, 7, 1)
        await turns()
        assert len(rank.released(7)) == 1
        leg_quiet(rank, 7, 2)
        await rank.release(7, 2)


# --- after a restart of the coordinator ----------------------------------------------------------

BROKEN: Final = Failure(Reason.TRANSPORT, "p/0", "the link broke")


async def remembered(stage: VirtualStage, quiet: str, verdict: Failure | None = BROKEN) -> list[RankPeer]:
    """A group whose former coordinator has told a verdict of room 7, and has not released it.

    ``quiet`` has a letter for each of its ranks: ``q`` for one that had told that its pages are quiet.
    """
    ranks = []
    for number, letter in enumerate(quiet):
        memory = Memory([Outcome(7, 3, verdict)], [], [Unreleased(7, 3, letter == "q")])
        had = {"epoch": 1, "acknowledged": 5, "memory": memory}
        ranks.append(RankPeer(stage, Role.PREFILL, "p", number, len(quiet), **had))
    for rank in ranks:
        rank.open()
        rank.send(rank.hello)
    for rank in ranks:
        await eventually_async(lambda rank=rank: rank.welcomed)  # type: ignore[misc]
    await turns()
    return ranks


async def test_what_a_former_coordinator_has_not_released_is_held_until_all_have_told() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await remembered(stage, "q-")
        await asyncio.sleep(1000)
        assert not ranks[0].released(7)
        assert "room 7 of p" in stage.service.overview.troubles()[0]
        leg_quiet(ranks[1], 7, 3)
        for rank in ranks:
            await rank.release(7, 3)
            rank.drain()
        await stage.empty()
        assert stage.service.counters.opened == 0


async def test_what_is_not_released_is_held_also_when_nobody_remembers_its_verdict() -> None:
    async with VirtualStage(own()) as stage:
        memory = Memory([], [], [Unreleased(7, 3)])
        rank = RankPeer(stage, Role.PREFILL, "p", 0, 1, epoch=1, acknowledged=5, memory=memory)
        await rank.join()
        await asyncio.sleep(1000)
        assert not rank.released(7)
        leg_quiet(rank, 7, 3)
        await rank.release(7, 3)
        rank.drain()
        await stage.empty()


async def test_what_all_had_told_the_former_one_is_released_at_once() -> None:
    async with VirtualStage(own()) as stage:
        for rank in await remembered(stage, "qq"):
            await rank.release(7, 3)


async def test_a_success_is_released_at_once() -> None:
    async with VirtualStage(own()) as stage:
        for rank in await remembered(stage, "--", verdict=None):
            await rank.release(7, 3)


async def test_a_process_that_has_ended_reads_nothing_also_after_a_restart() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await remembered(stage, "q-")
        stage.died(ranks[1])
        await ranks[0].release(7, 3)


async def test_a_room_that_was_in_flight_fails_and_is_held_until_all_have_told() -> None:
    async with VirtualStage(own()) as stage:
        memory = Memory([], [Held(7, 0, 0)], [])
        rank = RankPeer(stage, Role.PREFILL, "p", 0, 1, epoch=1, memory=memory)
        await rank.join()
        assert await rank.failure(7) == "coordinator_restarted"
        await asyncio.sleep(1000)
        assert not rank.released(7)
        rank.drain()
        leg_quiet(rank, 7)
        await rank.release(7)
        rank.drain()
        await stage.empty()


async def test_a_success_after_the_verdict_changes_nothing() -> None:
    async with engine(2) as (stage, ranks):
        for rank in ranks:
            rank.send_pages(7)
        leg_failed(ranks[0], 7, quiet=True)
        assert await ranks[1].failure(7) == "transport"
        leg_done(ranks[1], 7)
        await turns()
        assert stage.service.counters.late == {"legdone": 1}
        assert [outcome.succeeded for outcome in ranks[1].outcomes(7)] == [False]


async def test_an_end_that_nobody_waits_for_begins_nothing() -> None:
    async with engine(1) as (stage, ranks):
        leg_done(ranks[0], 7)
        assert "not in flight" in (await ranks[0].refused()).message
        leg_quiet(ranks[0], 7)
        await turns()
        assert stage.service.counters.opened == 0


async def test_a_room_is_used_again_after_its_release() -> None:
    async with engine(1) as (stage, ranks):
        for attempt in (1, 2):
            ranks[0].send_pages(7)
            leg_failed(ranks[0], 7, quiet=False)
            await ranks[0].outcome(7, attempt)
            ranks[0].drain()
            leg_quiet(ranks[0], 7, attempt)
            await ranks[0].release(7, attempt)
            ranks[0].drain()
        await stage.empty()


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (LegFailed(7, 0, "", quiet=True), "the engine's own transfer failed"),
        (Cancel(7, 0), "cancelled by the engine"),
    ],
)
async def test_a_failure_without_a_word_is_told_in_words(item: Item, told: str) -> None:
    async with engine(1) as (_, (rank,)):
        rank.send_pages(7)
        rank.submit(item)
        failure = (await rank.outcome(7)).failure
        assert failure is not None
        assert (failure.message, failure.origin) == (told, "p/0")


async def test_a_cancel_fails_it_on_all_ranks() -> None:
    async with engine(2) as (_, ranks):
        for rank in ranks:
            rank.send_pages(7)
            rank.cancel(7, "the client has gone")
        for rank in ranks:
            assert await rank.failure(7) == "cancelled_by_prefill"


async def test_a_dead_engine_leaves_nothing_behind() -> None:
    async with engine(2) as (stage, ranks):
        for rank in ranks:
            rank.send_pages(7)
        await turns()
        for rank in ranks:
            stage.died(rank)
        await turns()
        assert stage.service.counters.failed == {"rank_lost": 1}
        await stage.empty()


async def test_who_moves_the_pages_must_be_agreed_on() -> None:
    async with VirtualStage(own()) as stage:
        others = [
            RankPeer(stage, Role.PREFILL, "q", 0, 1, backend=""),
            RankPeer(stage, Role.DECODE, "d", 0, 1),
        ]
        for other in others:
            await other.join()
            assert other.refusals[0].fatal
            assert "move the pages by themselves" in other.refusals[0].message
    async with VirtualStage() as stage:
        mine = RankPeer(stage, Role.PREFILL, "p", 0, 1, backend=EXTERNAL)
        await mine.join()
        assert "this coordinator uses 'loopback'" in mine.refusals[0].message


async def test_a_rank_whose_pages_we_move_cannot_tell_of_transfers_of_its_own() -> None:
    async with VirtualStage() as stage:
        prefill, _, _ = await stage.pair(1)
        prefill[0].send_pages(7, 1)
        leg_done(prefill[0], 7)
        assert "only a rank of backend 'external'" in (await prefill[0].refused()).message
