"""A coordinator starts anew while rooms are begun: no verdict of another use, no page before it is quiet."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from coordinator.former_rooms import LOST
from coordinator.messages import Offer, Open, Outcome, Released, Role, Send
from coordinator.reasons import Failure, Reason
from tests.faults.chaos.deployment import SETTINGS, Deployment
from tests.faults.restarts import arrive, come_back, events, group, hand_over, has, hears, is_heard, pair
from tests.service.peers import pages
from tests.service.stage import virtual_time

if TYPE_CHECKING:
    from coordinator.messages import Event
    from tests.faults.chaos.ranks import StormRank

pytestmark = virtual_time


async def send_and_succeed(
    world: Deployment, prefill: StormRank, decode: StormRank, attempt: int, room: int = 7
) -> None:
    """Let prefill send what decode has offered already, and see it arrive."""
    prefill.say(Send(room, prefill.conversation.inbox.drained, pages(1), last=True, aux=b"of this use"))
    arrived = Outcome(room, attempt, None, b"of this use")
    await world.until(lambda: has(decode, arrived, Released(room, attempt)), 15, "it has arrived")
    await world.until(lambda: has(prefill, Outcome(room, attempt)), 15, "prefill hears")


@pytest.mark.parametrize("first", ["knows", "offers"])
@pytest.mark.parametrize("heard", ["by both", "by prefill"])
async def test_a_verdict_is_not_adopted_by_another_group_that_uses_the_room_next(
    first: str, heard: str
) -> None:
    """Case C38: success for pages into which nothing was written would be a wrong answer with HTTP 200."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        (other_prefill,) = await group(world, Role.PREFILL, "p2")
        (other_decode,) = await group(world, Role.DECODE, "d2")
        await asyncio.sleep(0.5)
        if heard == "by both":
            await hand_over(world, other_prefill, other_decode, 7, attempt=1)
        else:
            hears(other_decode, anything=False)
            other_decode.say(Offer(7, 0, pages(1)))
            other_prefill.say(Send(7, 0, pages(1), last=True, aux=b"of the use before"))
            await world.until(lambda: has(other_prefill, Outcome(7, 1)), 5, "prefill has heard it")
        await world.kill()
        decode.say(Offer(7, 0, pages(1)))
        knowing, offering = [other_prefill], [decode]
        hears(other_decode, anything=True)
        await come_back(world, *((knowing, offering) if first == "knows" else (offering, knowing)))
        await asyncio.sleep(1.0)
        assert events(decode) == []
        await come_back_too(world, prefill, other_decode)
        await world.until(lambda: world.is_ready("p"), 10, "prefill is back")
        await send_and_succeed(world, prefill, decode, attempt=2)
        before: list[Event] = [Outcome(7, 1, None, b"of the use before"), Released(7, 1)]
        if heard == "by both":
            before[0] = Outcome(7, 1, None, b"first token")
        await world.until(lambda: has(other_decode, *before), 15, "the other decode has its own verdict")
        assert events(other_decode) == before


async def come_back_too(world: Deployment, *ranks: StormRank) -> None:
    """Let these find the coordinator that runs."""
    assert world.stage is not None
    for rank in ranks:
        world.find(rank)
    for rank in ranks:
        await world.until(partial(is_heard, world.stage, rank), 5, f"{rank.name} is back")


@pytest.mark.parametrize("first", ["knows", "offers"])
async def test_a_verdict_is_not_adopted_by_the_next_engine_of_that_name(first: str) -> None:
    """Case C38: a decode engine that was restarted is offered the room again, with pages of its own."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        hears(decode, anything=False)
        decode.say(Offer(7, 0, pages(1)))
        prefill.say(Send(7, 0, pages(1), last=True, aux=b"of the use before"))
        await world.until(lambda: has(prefill, Outcome(7, 1)), 5, "prefill has heard it")
        await world.kill()
        decode.die()
        await world.begin(find=False)
        new = world.add(Role.DECODE, "d", 0, 1)
        if first == "knows":
            await come_back_too(world, prefill)
        await world.until(lambda: world.is_ready("d"), 10, "the new engine is there")
        new.say(Offer(7, new.conversation.inbox.drained, pages(1)))
        await asyncio.sleep(0.5)
        if first == "offers":
            await come_back_too(world, prefill)
        await asyncio.sleep(1.0)
        assert events(new) == []
        await send_and_succeed(world, prefill, new, attempt=2)


@pytest.mark.parametrize("first", ["p", "d"])
async def test_what_was_adopted_is_not_adopted_again_by_the_next_coordinator(first: str) -> None:
    """Case C05: the coordinator dies twice, the second time after decode was told what prefill knew."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        for room in (1, 2, 3):
            await hand_over(world, prefill, decode, room, attempt=1)
        hears(decode, anything=False)
        decode.say(Offer(7, decode.conversation.inbox.drained, pages(1)))
        decode.say(Offer(8, decode.conversation.inbox.drained, pages(1)))
        for room in (8, 7):
            prefill.say(
                Send(room, prefill.conversation.inbox.drained, pages(1), last=True, aux=b"first token")
            )
        await world.until(lambda: has(prefill, Outcome(7, 1), Outcome(8, 1)), 5, "prefill has heard it")
        await world.kill()
        hears(decode, anything=True)
        order = ([prefill], [decode]) if first == "p" else ([decode], [prefill])
        await come_back(world, *order)
        arrived = Outcome(7, 1, None, b"first token")
        await world.until(
            lambda: has(decode, arrived, Released(7, 1), Released(8, 1)), 15, "decode has heard"
        )
        # It uses one of the rooms again, and nobody has heard of that when the coordinator dies.
        await world.kill()
        before = len(events(decode))
        decode.say(Offer(7, decode.conversation.inbox.drained, pages(1)))
        await come_back(world, *order)
        await asyncio.sleep(1.0)
        assert len(events(decode)) == before
        await send_and_succeed(world, prefill, decode, attempt=2)


@pytest.mark.parametrize("confirmed", ["nothing", "decode's"])
async def test_what_the_former_coordinator_may_have_begun_is_not_begun_again(confirmed: str) -> None:
    """Case C17: its bytes may still land, on pages that decode would go on filling after a success."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        if confirmed == "nothing":
            hears(decode, anything=False)
        hears(prefill, anything=False)
        decode.say(Offer(7, 0, pages(1)))
        await arrive(world, 7)
        await asyncio.sleep(1.5)
        prefill.say(Send(7, 0, pages(1), last=True, aux=b"first token"))
        assert world.stage is not None
        active = world.stage.service.rooms.active
        await world.until(lambda: active[7].flights, 5, "bytes move")
        await world.kill()
        for rank in (prefill, decode):
            hears(rank, anything=True)
        await come_back(world, [prefill], [decode])
        began_s = world.now_s()
        lost = Outcome(7, 1, Failure(Reason.COORDINATOR_RESTARTED, "", LOST))
        await world.until(lambda: has(decode, lost) and has(prefill, lost), 10, "a verdict")
        assert world.now_s() - began_s < 2.0
        quiet_s = SETTINGS.rank.reattach_s + SETTINGS.release.drain_s
        await world.until(lambda: has(decode, Released(7, 1)), 15, "decode's pages come back")
        assert world.now_s() - began_s > quiet_s - 1.0
        await world.until(lambda: has(prefill, Released(7, 1)), 15, "prefill's pages come back")


@pytest.mark.parametrize("first", ["p", "d"])
async def test_what_was_said_while_nobody_was_there_is_handed_over_when_somebody_is(first: str) -> None:
    """Nobody has begun it, so it is a handoff like any other."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        await world.kill()
        decode.say(Offer(7, 0, pages(1)))
        prefill.say(Send(7, 0, pages(1), last=True, aux=b"first token"))
        await come_back(world, *(([prefill], [decode]) if first == "p" else ([decode], [prefill])))
        began_s = world.now_s()
        arrived = Outcome(7, 1, None, b"first token")
        await world.until(lambda: has(decode, arrived, Released(7, 1)), 5, "it has arrived")
        assert world.now_s() - began_s < 1.0


async def test_a_new_rank_that_was_there_before_the_past_of_its_group_is_one_of_it() -> None:
    """Although it has heard what was told to the group between that and its next word."""
    async with Deployment() as world:
        (gone, old), decode = await pair(world, 2)
        for rank in (gone, old):
            rank.say(Open(7, 0))
        for rank in decode:
            rank.say(Offer(7, 0, pages(1)))
        await arrive(world, 7)
        await asyncio.sleep(1.5)
        await world.kill()
        gone.die()
        await world.begin(find=False)
        new = world.add(Role.PREFILL, "p", 0, 2)
        assert world.stage is not None
        await world.until(partial(is_heard, world.stage, new), 5, "the new one is there")
        await asyncio.sleep(1.0)
        await come_back_too(world, *decode, old)
        lost = Outcome(7, 1, Failure(Reason.COORDINATOR_RESTARTED, "", LOST))
        await world.until(lambda: all(has(rank, lost) for rank in (new, old, *decode)), 10, "a verdict")
        await world.until(lambda: world.is_ready("p"), 5, "the group is whole")
