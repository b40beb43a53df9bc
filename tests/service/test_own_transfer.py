"""Prefill engines that move the pages by themselves: their ranks tell how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from coordinator.messages import EXTERNAL, LegDone, LegFailed, LegQuiet, Role
from tests.service.peers import RankPeer
from tests.service.stage import VirtualStage, config, now_s, turns, virtual_time

if TYPE_CHECKING:
    from coordinator.config import Config

pytestmark = virtual_time

DEADLINE_S: Final = 20.0
UNPROVEN_S: Final = 50.0


def own(**sections: dict[str, object]) -> Config:
    """The configuration of a coordinator for such engines."""
    bounds: dict[str, dict[str, object]] = {
        "handoff": {"deadline_s": DEADLINE_S},
        "release": {"unproven_s": UNPROVEN_S},
    }
    return config(backend={"name": EXTERNAL}, **(bounds | sections))


def leg_done(rank: RankPeer, room: int) -> None:
    rank.submit(LegDone(room, rank.applied))


def leg_failed(rank: RankPeer, room: int, *, quiet: bool) -> None:
    rank.submit(LegFailed(room, rank.applied, "the link broke", quiet))


def leg_quiet(rank: RankPeer, room: int) -> None:
    rank.submit(LegQuiet(room, rank.applied))


async def test_it_succeeds_when_all_ranks_are_complete_and_all_their_transfers_are_done() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
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
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        ranks[0].send_pages(7)
        leg_done(ranks[0], 7)
        await turns()
        ranks[1].send_pages(7)
        leg_done(ranks[1], 7)
        assert (await ranks[0].outcome(7)).succeeded


async def test_a_transfer_that_never_ends_fails_at_the_deadline_and_names_its_rank() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
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
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
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
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        ranks[0].send_pages(7)
        leg_failed(ranks[0], 7, quiet=True)
        assert await ranks[0].failure(7) == "transport"
        await turns()
        assert not ranks[0].released(7)
        leg_quiet(ranks[1], 7)
        await ranks[0].release(7)


async def test_pages_whose_engine_cannot_prove_them_quiet_are_let_go_at_the_bound() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 1)
        ranks[0].send_pages(7)
        leg_failed(ranks[0], 7, quiet=False)
        await ranks[0].outcome(7)
        began_s = now_s()
        await ranks[0].release(7)
        assert now_s() - began_s == pytest.approx(UNPROVEN_S, abs=1.0)
        ranks[0].drain()
        await stage.empty()


async def test_a_success_after_the_verdict_changes_nothing() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        for rank in ranks:
            rank.send_pages(7)
        leg_failed(ranks[0], 7, quiet=True)
        assert await ranks[1].failure(7) == "transport"
        leg_done(ranks[1], 7)
        await turns()
        assert stage.service.counters.late == {"legdone": 1}
        assert [outcome.succeeded for outcome in ranks[1].outcomes(7)] == [False]


async def test_an_end_that_nobody_waits_for_begins_nothing() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 1)
        leg_done(ranks[0], 7)
        assert "not in flight" in (await ranks[0].refused()).message
        leg_quiet(ranks[0], 7)
        await turns()
        assert stage.service.counters.opened == 0


async def test_a_room_is_used_again_after_its_release() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 1)
        for attempt in (1, 2):
            ranks[0].send_pages(7)
            leg_failed(ranks[0], 7, quiet=False)
            await ranks[0].outcome(7, attempt)
            ranks[0].drain()
            leg_quiet(ranks[0], 7)
            await ranks[0].release(7, attempt)
            ranks[0].drain()
        await stage.empty()


async def test_a_cancel_fails_it_on_all_ranks() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        for rank in ranks:
            rank.send_pages(7)
            rank.cancel(7, "the client has gone")
        for rank in ranks:
            assert await rank.failure(7) == "cancelled_by_prefill"


async def test_a_dead_engine_leaves_nothing_behind() -> None:
    async with VirtualStage(own()) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
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
