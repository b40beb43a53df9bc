"""Replays: a rank that is far behind gets what it missed, and holds up nobody."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from coordinator.broadcast import FULL_BYTES, HEARTBEAT_S, MAX_EVENTS, GroupLog, fitting
from coordinator.messages import MAX_AUX_BYTES, Event, Outcome, Released, Role
from tests.service.peers import RankPeer
from tests.service.stage import VirtualStage, config, turns, virtual_time
from tests.support.waiting import eventually_async


@pytest.mark.parametrize("seed", range(3))
def test_a_log_hands_out_what_a_list_would(seed: int) -> None:
    dice = random.Random(seed)
    log = GroupLog()
    everything: list[Released] = []
    kept_from = 0
    for number in range(1, 400):
        log.append(Released(number, 1))
        everything.append(Released(number, 1))
        if dice.random() < 0.1:
            kept_from = max(kept_from, dice.randint(0, number))
            log.trim(kept_from)
        after = dice.randint(0, number + 3)
        most = dice.choice([None, 1, 5, 1000])
        expected = everything[max(after, kept_from) :]
        assert log.since(after, most) == (expected if most is None else expected[:most])
        assert (log.head, log.first, len(log)) == (number, kept_from + 1, number - kept_from)


@pytest.mark.parametrize("after", [0, 100_000, 199_990])
def test_a_long_log_is_read_in_a_moment(after: int) -> None:
    """Case C49: the loop must not stall over it."""
    log = GroupLog()
    for number in range(1, 200_001):
        log.append(Released(number, 1))
    started_s = time.process_time()
    assert log.since(after, MAX_EVENTS)[0] == Released(after + 1, 1)
    assert time.process_time() - started_s < 0.05


def test_a_message_is_full_at_a_number_of_events_or_of_bytes() -> None:
    small: list[Event] = [Outcome(room, 1) for room in range(1, 2000)]
    assert fitting(small) == small[:MAX_EVENTS]
    large: list[Event] = [Outcome(room, 1, None, bytes(FULL_BYTES // 4)) for room in range(1, 9)]
    assert FULL_BYTES == 4 * MAX_AUX_BYTES
    assert fitting(large) == large[:4]
    assert fitting(large[:3]) == large[:3]
    assert fitting([]) == []


@virtual_time
async def test_a_group_that_has_nothing_to_hear_hears_the_head_every_half_second() -> None:
    """Else nobody would notice that its last message was lost."""
    async with VirtualStage() as stage:
        ranks = await stage.group(Role.DECODE, "d", 2)
        ranks[0].cancel(7)
        await ranks[1].release(7)
        for rank in ranks:
            rank.broadcasts.clear()
        await asyncio.sleep(20 * HEARTBEAT_S)
        for rank in ranks:
            assert [message.first for message in rank.broadcasts] == [3] * len(rank.broadcasts)
            assert 19 <= len(rank.broadcasts) <= 21


@virtual_time
async def test_who_is_there_is_told_at_once() -> None:
    """An engine waits for its ranks to be ready; a heartbeat later would do, but need not be waited for."""
    async with VirtualStage() as stage:
        first, second = (RankPeer(stage, Role.DECODE, "d", number, 2) for number in range(2))
        await first.join()
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert first.broadcasts[-1].missing == [1]
        await second.join()
        await eventually_async(lambda: second.listening)
        await turns()
        assert first.broadcasts[-1].ready
        stage.died(second)
        await turns()
        assert first.broadcasts[-1].missing == [1]


@virtual_time
async def test_a_rank_that_is_far_behind_catches_up_in_parts() -> None:
    """Case C41: it joins when thousands of verdicts have been told."""
    async with VirtualStage(config(handoff={"deadline_s": 1.0})) as stage:
        (first, second) = await stage.group(Role.DECODE, "d", 2)
        second.acknowledges = False
        rooms = range(1, 3001)
        for room in rooms:
            first.cancel(room)
        await first.heard(len(rooms), Released)
        group = stage.service.membership.groups["d"]
        assert len(group.log) == 2 * len(rooms)
        second.acknowledges = True
        second.again()
        await second.heard(len(rooms), Released)
        assert second.events == first.events
        assert {outcome.room for outcome in second.outcomes()} == set(rooms)
        assert second.welcomed > 2 * len(rooms) // MAX_EVENTS
        for rank in (first, second):
            rank.drain()
        await stage.empty()


@virtual_time
async def test_what_is_told_in_one_turn_goes_out_in_bounded_parts() -> None:
    async with VirtualStage() as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        rooms = range(1, 2001)
        for room in rooms:
            ranks[0].open_room(room)
        await eventually_async(lambda: len(stage.service.rooms.active) == len(rooms))
        for rank in ranks:
            rank.broadcasts.clear()
        ranks[1].leave()
        await ranks[0].heard(len(rooms), Released)
        parts = [len(message.events) for message in ranks[0].broadcasts if message.events]
        assert max(parts) <= MAX_EVENTS
        assert sum(parts) == 2 * len(rooms)
        assert all(isinstance(event, Outcome | Released) for event in ranks[0].events)


@virtual_time
@pytest.mark.parametrize("told", ["at once", "anew"])
async def test_no_message_is_larger_than_a_rank_takes(told: str) -> None:
    """Each verdict may bring 1 MiB of side data, and a rank cuts its line at 64 MiB."""
    async with VirtualStage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        group = stage.service.membership.groups["d"]
        events = [Outcome(room, 1, None, bytes(MAX_AUX_BYTES)) for room in range(1, 71)]
        for event in events:
            stage.service.rooms.tell(group, event)
        if told == "anew":
            group.published = group.log.head  # The broadcast was lost.
            rank.again()
        await rank.heard(len(events), Outcome)
        assert rank.outcomes() == events
        assert rank.largest_bytes < 16 << 20
