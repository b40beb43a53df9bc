"""A coordinator that starts anew, in the cases in which a rank knows what the others do not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from coordinator.client import recollection
from coordinator.client.standing import RankState
from coordinator.errors import RefusedError
from coordinator.former_rooms import LOST
from coordinator.messages import Cancel, Offer, Open, Outcome, Released, Role, Send
from coordinator.reasons import Failure, Reason
from coordinator.rooms import SIDE_DATA_LOST
from tests.faults.chaos.deployment import SETTINGS, Deployment
from tests.faults.restarts import arrive, come_back, events, group, group_at, hand_over, has, hears, pair
from tests.service.peers import LAYOUT, pages
from tests.service.stage import now_s, virtual_time

if TYPE_CHECKING:
    from tests.faults.chaos.ranks import StormRank

pytestmark = virtual_time


@pytest.mark.parametrize("first", ["p", "d"])
async def test_a_verdict_that_one_side_has_heard_is_adopted_by_the_other_in_whatever_order_they_come(
    first: str,
) -> None:
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        prefill.say(Open(7, 0))
        decode.say(Offer(7, 0, pages(1)))
        await arrive(world, 7)
        await asyncio.sleep(1.0)
        hears(decode, anything=False)
        prefill.say(Cancel(7, 0, "enough"))
        cancelled = Outcome(7, 1, Failure(Reason.CANCELLED_BY_PREFILL, "p/0", "enough"))
        await world.until(lambda: has(prefill, cancelled), 5, "prefill has heard it")
        assert not events(decode)
        await world.kill()
        hears(decode, anything=True)
        await come_back(world, *(([prefill], [decode]) if first == "p" else ([decode], [prefill])))
        await world.until(lambda: has(decode, cancelled, Released(7, 1)), 15, "decode has heard it, too")
        await asyncio.sleep(10.0)
        assert events(prefill) == [cancelled, Released(7, 1)]
        assert events(decode) == [cancelled, Released(7, 1)]
        assert world.stage is not None
        assert not world.stage.left()
        world.stage.check()


@pytest.mark.parametrize("world_size", [1, 2])
async def test_pages_of_a_rank_that_stood_still_meanwhile_are_not_quiet_when_it_goes_on(
    world_size: int,
) -> None:
    """Case C23: what the former coordinator's workers wrote is in its buffers, and lands now.

    The other ranks of its group are in it, too: they go by the same release.
    """
    async with Deployment() as world:
        prefill, decode = await pair(world, world_size)
        for ours, theirs in zip(prefill, decode, strict=True):
            ours.say(Open(7, 0))
            theirs.say(Offer(7, 0, pages(1)))
        await arrive(world, 7)
        await asyncio.sleep(1.0)
        stopped = decode[-1]
        stopped.freeze()
        await world.kill()
        await come_back(world, prefill, decode[:-1])
        await asyncio.sleep(20.0)
        assert not any(Released(7, 1) in events(rank) for rank in decode)
        stopped.thaw()
        began_s = now_s()
        assert world.stage is not None
        world.find(stopped)
        await world.until(lambda: all(has(rank, Released(7, 1)) for rank in decode), 15, "the release")
        assert now_s() - began_s >= SETTINGS.release.drain_s
        assert all(has(rank, Released(7, 1)) for rank in prefill)


@pytest.mark.parametrize("first", ["p", "d"])
async def test_a_success_that_prefill_has_heard_is_one_for_decode_with_its_side_data(first: str) -> None:
    """Case C29: prefill's rank 0 remembers what went with the verdict that decode has not heard."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        hears(decode, anything=False)
        decode.say(Offer(7, 0, pages(1)))
        prefill.say(Send(7, 0, pages(1), last=True, aux=b"first token"))
        await world.until(lambda: has(prefill, Outcome(7, 1)), 5, "prefill has heard it")
        assert not events(decode)
        await world.kill()
        hears(decode, anything=True)
        await come_back(world, *(([prefill], [decode]) if first == "p" else ([decode], [prefill])))
        arrived = Outcome(7, 1, None, b"first token")
        await world.until(lambda: has(decode, arrived, Released(7, 1)), 15, "decode has the verdict")
        assert events(decode) == [arrived, Released(7, 1)]


async def test_a_success_without_its_side_data_is_none() -> None:
    """Case C29: the one rank that could have told is gone, too."""
    async with Deployment() as world:
        prefill, decode = await pair(world, 2)
        for rank in decode:
            hears(rank, anything=False)
            rank.say(Offer(7, 0, pages(1)))
        for rank in prefill:
            rank.say(Send(7, 0, pages(1), last=True, aux=b"first token" if rank is prefill[0] else b""))
        await world.until(
            lambda: all(has(rank, Outcome(7, 1)) for rank in prefill), 5, "prefill has heard it"
        )
        await world.kill()
        prefill[0].die()
        await world.begin(find=False)
        new = world.add(Role.PREFILL, "p", 0, 2)
        for rank in (*decode, prefill[1]):
            hears(rank, anything=True)
            world.find(rank)
        await world.until(lambda: world.is_ready("p"), 10, "prefill is back, with a new rank 0")
        lost = Outcome(7, 1, Failure(Reason.COORDINATOR_RESTARTED, "", SIDE_DATA_LOST))
        for rank in decode:
            await world.until(lambda rank=rank: has(rank, lost, Released(7, 1)), 15, "a verdict")  # type: ignore[misc]
        assert not [event for event in events(new) if isinstance(event, Outcome) and event.failure]


@pytest.mark.parametrize("deaf", [0, 1])
@pytest.mark.parametrize("first", ["p", "d"])
async def test_a_success_that_one_prefill_rank_has_heard_is_one_for_decode(first: str, deaf: int) -> None:
    """Case C29: also when the rank that had sent the side data is not the one that has heard."""
    async with Deployment() as world:
        prefill, decode = await pair(world, 2)
        for rank in (*decode, prefill[deaf]):
            hears(rank, anything=False)
        for rank in decode:
            rank.say(Offer(7, 0, pages(1)))
        for rank in prefill:
            rank.say(Send(7, 0, pages(1), last=True, aux=b"first token" if rank is prefill[0] else b""))
        await world.until(lambda: has(prefill[1 - deaf], Outcome(7, 1)), 5, "one has heard it")
        await world.kill()
        for rank in (*decode, prefill[deaf]):
            hears(rank, anything=True)
        await come_back(world, *((prefill, decode) if first == "p" else (decode, prefill)))
        arrived = Outcome(7, 1, None, b"first token")
        for rank in decode:
            await world.until(lambda rank=rank: has(rank, arrived, Released(7, 1)), 15, "a verdict")  # type: ignore[misc]
            assert events(rank) == [arrived, Released(7, 1)]
        await world.until(lambda: has(prefill[deaf], Outcome(7, 1), Released(7, 1)), 15, "the other, too")


@pytest.mark.parametrize("first", ["p", "d"])
async def test_a_success_that_decode_has_heard_is_one_for_prefill(first: str) -> None:
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        hears(prefill, anything=False)
        decode.say(Offer(7, 0, pages(1)))
        prefill.say(Send(7, 0, pages(1), last=True, aux=b"first token"))
        await world.until(lambda: has(decode, Outcome(7, 1, None, b"first token")), 5, "decode has heard it")
        assert not events(prefill)
        await world.kill()
        hears(prefill, anything=True)
        await come_back(world, *(([prefill], [decode]) if first == "p" else ([decode], [prefill])))
        await world.until(lambda: has(prefill, Outcome(7, 1), Released(7, 1)), 15, "prefill has, too")
        assert events(prefill) == [Outcome(7, 1), Released(7, 1)]


async def test_groups_of_several_sizes_come_back_in_any_order() -> None:
    """None is refused because those that it fits are not there yet."""
    async with Deployment() as world:
        await world.begin()
        ranks: list[StormRank] = []
        for role in Role:
            for size in (1, 2):
                ranks += await group(world, role, f"{role.value}-{size}", size)
        await world.kill()
        names = ["prefill-1", "decode-2", "prefill-2", "decode-1"]
        await come_back(world, *([rank for rank in ranks if rank.hello.group == name] for name in names))
        await world.until(lambda: all(world.is_ready(name) for name in names), 10, "all are back")


async def test_a_new_coordinator_lets_those_try_again_that_fit_nobody_yet() -> None:
    """Case C47 is for later: while others are still coming back, who fits may be among them."""
    async with Deployment() as world:
        await group_at(world, Role.PREFILL, "p", 2)
        other = msgspec.structs.replace(LAYOUT, page_tokens=2 * LAYOUT.page_tokens)
        decode = world.add(Role.DECODE, "d", 0, 1, layout=other)
        talk = decode.conversation
        await world.until(lambda: "does not fit p" in talk.standing.explain(), 5, "it is told why")
        world.add(Role.PREFILL, "p1", 0, 1, layout=other)
        await world.until(lambda: world.is_ready("d"), 5, "it is welcome now")


async def test_a_new_rank_of_a_known_group_is_welcome_though_those_that_it_fits_are_gone() -> None:
    async with Deployment() as world:
        await group_at(world, Role.PREFILL, "p1", 1)
        other = msgspec.structs.replace(LAYOUT, page_tokens=2 * LAYOUT.page_tokens)
        large = await group(world, Role.PREFILL, "p2", 2, other)
        decode = await group(world, Role.DECODE, "d2", 2, other)
        for rank in (*large, decode[0]):
            rank.die()
            world.show_death(rank)
        await asyncio.sleep(5.0)
        world.add(Role.DECODE, "d2", 0, 2, layout=other)
        await world.until(lambda: world.is_ready("d2"), 5, "the new rank is there")


async def test_a_release_that_one_rank_has_heard_is_told_to_the_others_once() -> None:
    async with Deployment(fails=1.0) as world:
        prefill, (first, second) = await pair(world, 2)
        for rank in (first, second):
            rank.say(Offer(7, 0, pages(1)))
        for rank in prefill:
            rank.say(Send(7, 0, pages(1), last=True))
        await world.until(lambda: events(first) and events(second), 5, "both have the verdict")
        # What has failed may land for a while, so the release comes later.
        hears(second, anything=False)
        await world.until(lambda: has(first, Released(7, 1)), 5, "one rank has the release")
        assert len(events(second)) == 1
        await world.kill()
        hears(second, anything=True)
        await come_back(world, [first, second], prefill)
        await world.until(lambda: has(second, Released(7, 1)), 15, "the other one hears of it")
        await asyncio.sleep(10.0)
        assert events(first) == events(second)
        assert len(events(first)) == 2


async def test_what_an_old_rank_remembers_counts_when_a_new_one_has_heard_more() -> None:
    """Else the numbers of attempts would begin anew."""
    async with Deployment() as world:
        prefill, (first, second) = await pair(world, 2)
        for attempt in (1, 2):
            await cancelled(world, 7, attempt, first, second)
        first.die()
        world.show_death(first)
        new = world.add(Role.DECODE, "d", 0, 2)
        await world.until(lambda: world.is_ready("d"), 5, "a new rank is there")
        hears(second, anything=False)
        new.say(Cancel(8, new.conversation.inbox.drained, "enough"))
        await world.until(lambda: events(new), 5, "the new rank has more")
        await world.kill()
        hears(second, anything=True)
        await come_back(world, [new, second], prefill)
        await world.until(lambda: world.is_ready("d"), 10, "both are back")
        await cancelled(world, 7, 3, new, second)


async def cancelled(world: Deployment, room: int, attempt: int, *ranks: StormRank) -> None:
    """Let the first rank give a room up, and all of them hear that this was its attempt of that number."""
    events(ranks[0])
    after = ranks[0].conversation.inbox.drained
    begins = ranks[0].hello.role is Role.PREFILL
    ranks[0].say(Open(room, after) if begins else Offer(room, after, pages(1)))
    ranks[0].say(Cancel(room, after, "enough"))

    def heard() -> bool:
        return all(
            any(
                isinstance(event, Outcome) and (event.room, event.attempt) == (room, attempt) for event in had
            )
            for had in map(events, ranks)
        )

    await world.until(heard, 5, f"attempt {attempt} of room {room}")


async def test_a_rank_that_is_there_before_its_group_comes_back_joins_that() -> None:
    """It has said and heard nothing yet, and begins where the others stand."""
    async with Deployment() as world:
        prefill, (first, second) = await pair(world, 2)
        first.say(Cancel(7, 0, "enough"))
        await world.until(lambda: len(events(first)) == len(events(second)) == 2, 5, "both have a verdict")
        await world.kill()
        second.die()
        await world.begin(find=False)
        new = world.add(Role.DECODE, "d", 1, 2)
        await world.until(lambda: new.conversation.joined, 5, "the new rank is there")
        for rank in (first, *prefill):
            world.find(rank)
        await world.until(lambda: world.is_ready("d"), 10, "the group is back")
        new.say(Cancel(8, new.conversation.inbox.drained, "enough"))
        await world.until(lambda: len(events(new)) == 2, 5, "a verdict")
        assert [event.room for event in events(new)] == [8, 8]
        await world.until(lambda: len(events(first)) == 4, 5, "the same on the old rank")
        assert list(new.applied) == list(first.applied)[2:]


async def test_a_rank_that_comes_too_late_is_served_from_what_the_others_remember() -> None:
    """Its group has not waited for it, but nothing has become different from what it knows."""
    async with Deployment() as world:
        prefill, (first, second) = await pair(world, 2)
        first.say(Cancel(7, 0, "enough"))
        await world.until(lambda: len(events(first)) == len(events(second)) == 2, 5, "both have a verdict")
        hears(second, anything=False)
        first.say(Cancel(8, 2, "enough"))
        await world.until(lambda: len(events(first)) == 4, 5, "one rank has another one")
        await world.kill()
        hears(second, anything=True)
        await come_back(world, prefill, [first])
        await asyncio.sleep(4.0)
        first.say(Cancel(9, 4, "enough"))
        await asyncio.sleep(1.0)
        world.find(second)
        await world.until(lambda: world.is_ready("d"), 10, "it is taken back")
        await world.until(lambda: len(events(first)) == len(events(second)) == 6, 5, "both have all")
        assert events(first) == events(second)


async def test_two_that_have_heard_different_things_are_not_put_together() -> None:
    """The group went on without one of them, and its coordinator is gone before that one came."""
    async with Deployment() as world:
        prefill, (first, second) = await pair(world, 2)
        hears(second, anything=False)
        first.say(Cancel(7, 0, "enough"))
        await world.until(lambda: len(events(first)) == 2, 5, "one rank has a verdict")
        await world.kill()
        # The second one alone is found by the next coordinator, and told something else.
        hears(second, anything=True)
        await come_back(world, prefill, [second])
        await asyncio.sleep(4.0)
        second.say(Cancel(8, 0, "enough"))
        await world.until(lambda: len(events(second)) == 2, 5, "the other one has another verdict")
        await world.kill()
        await world.begin()
        with pytest.raises(RefusedError, match="went on without this rank"):
            await world.until(lambda: False, 10, "one is refused")
        states = {rank.conversation.standing.state for rank in (first, second)}
        assert states == {RankState.REFUSED, RankState.JOINED}


async def test_attempts_are_counted_on_when_the_other_side_has_seen_more_of_them() -> None:
    """One that began before that was known gets its number when nobody has heard it yet."""
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        for attempt in (1, 2):
            await cancelled(world, 7, attempt, prefill)
        await world.kill()
        await world.begin(find=False)
        (new,) = await group(world, Role.DECODE, "d9")
        new.say(Offer(7, 0, pages(1)))
        await arrive(world, 7)
        for rank in (prefill, decode):
            world.find(rank)
        await world.until(lambda: world.is_ready("p"), 5, "the group that knows more is back")
        await cancelled(world, 7, 3, new)


async def test_a_verdict_that_one_side_has_forgotten_is_not_taken_for_that_of_the_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case C38: never a false match."""
    monkeypatch.setattr(recollection, "MAX_REMEMBERED", 4)
    async with Deployment() as world:
        (prefill,), (decode,) = await pair(world)
        await hand_over(world, prefill, decode, 7, attempt=1)
        # Decode goes on with others, and remembers only the last of that.
        (other,) = await group(world, Role.PREFILL, "p2")
        await asyncio.sleep(0.5)
        for room in (8, 9, 10):
            await hand_over(world, other, decode, room, attempt=1)
        await world.kill()
        await come_back(world, [prefill], [decode], [other])
        await asyncio.sleep(5.0)
        await hand_over(world, prefill, decode, 7, attempt=2)


@pytest.mark.parametrize("first", ["old", "new"])
async def test_a_room_that_a_new_rank_holds_keeps_the_count_of_its_attempts(first: str) -> None:
    """What is told of it at once, when its group comes back, the new rank hears like the old one."""
    async with Deployment() as world:
        prefill, (gone, old) = await pair(world, 2)
        for attempt in (1, 2):
            for rank in prefill:
                events(rank)
                rank.say(Open(7, rank.conversation.inbox.drained))
            await arrive(world, 7)
            await cancelled(world, 7, attempt, gone, old, *prefill)
        gone.die()
        world.show_death(gone)
        new = world.add(Role.DECODE, "d", 0, 2)
        await world.until(lambda: world.is_ready("d"), 5, "a new rank is there")
        for rank in (new, old):
            rank.say(Offer(7, rank.conversation.inbox.drained, pages(1)))
        for rank in prefill:
            rank.say(Open(7, rank.conversation.inbox.drained))
        await arrive(world, 7)
        await asyncio.sleep(1.5)
        await world.kill()
        await come_back(world, [new, old] if first == "new" else [old, new], prefill)
        lost = Outcome(7, 3, Failure(Reason.COORDINATOR_RESTARTED, "", LOST))
        await world.until(lambda: all(has(rank, lost) for rank in (new, old, *prefill)), 10, "the verdict")


async def test_a_new_rank_begins_where_the_others_stand_and_not_where_the_coordinator_does() -> None:
    """Else, when that dies as well, nobody would know what lies between."""
    async with Deployment() as world:
        prefill, (gone, old) = await pair(world, 2)
        for rank in (gone, old):
            rank.say(Offer(7, 0, pages(1)))
        for rank in prefill:
            rank.say(Open(7, 0))
        await arrive(world, 7)
        await asyncio.sleep(1.5)
        await world.kill()
        gone.die()
        hears(old, anything=False)
        await come_back(world, prefill, [old])
        await asyncio.sleep(1.0)
        new = world.add(Role.DECODE, "d", 0, 2)
        await world.until(lambda: new.conversation.joined, 5, "a new rank is there")
        await world.kill()
        hears(old, anything=True)
        await come_back(world, prefill, [new, old])
        await world.until(lambda: world.is_ready("d"), 10, "both are taken back")
