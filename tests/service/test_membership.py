"""Ranks join, return, contest a place, and are lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import Outcome, Process, Released, Role
from tests.service.peers import RankPeer
from tests.service.stage import Stage, config, now_s, turns
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from tests.support.processes import Programs

HERE = (Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/pid").stat().st_ino)


def here(pid: int) -> Process:
    """A process that the coordinator can watch."""
    return Process(pid, *HERE)


# --- a process that dies ---------------------------------------------------------------------


async def test_the_death_of_a_local_process_is_seen_at_once(programs: Programs) -> None:
    async with Stage(config(release={"settle_s": 0.1})) as stage:
        prefill, _, _ = await stage.pair(auto=False)
        program = programs.start("/bin/sleep", "60")
        (decode,) = await stage.group(Role.DECODE, "local", 1, process=here(program.process.pid))
        decode.offer(7, 1)
        prefill[0].send_pages(7, 1)
        await turns()
        started_s = now_s()
        program.process.kill()
        decode.stop()
        assert await prefill[0].failure(7) == "peer_lost"
        assert now_s() - started_s < 2.0
        await prefill[0].release(7)
        prefill[0].drain()
        assert "local" not in stage.service.membership.groups
        await stage.empty()


async def test_a_process_that_died_before_its_hello_arrived_is_lost(programs: Programs) -> None:
    program = programs.start("/bin/true")
    program.wait()
    async with Stage() as stage:
        rank = RankPeer(stage, Role.DECODE, "d", 0, 1, process=here(program.process.pid))
        await rank.join()
        await eventually_async(lambda: "d" not in stage.service.membership.groups)
        assert stage.service.counters.ranks_lost == 1


@pytest.mark.parametrize("pid", [0, 2**31 - 1, 2**31, 2**62])
async def test_a_pid_that_is_none_harms_nobody(pid: int) -> None:
    async with Stage() as stage:
        rank = RankPeer(stage, Role.DECODE, "d", 0, 1, process=here(pid))
        await rank.join()
        assert rank.welcomed
        (other,) = await stage.group(Role.DECODE, "other", 1)
        other.cancel(7)
        assert await other.failure(7) == "cancelled_by_decode"


async def test_the_last_hello_of_a_dead_process_does_not_bring_it_back() -> None:
    async with Stage() as stage:
        first, second = await stage.group(Role.DECODE, "d", 2)
        stage.service.membership._died(stage.member(first))
        first.again()
        await turns()
        member = stage.service.membership.groups["d"].ranks[0]
        assert member is not None
        assert not (member.alive and member.gone)
        assert second.listening


async def test_many_descriptors_are_no_obstacle(programs: Programs) -> None:
    program = programs.start("/bin/sleep", "60")
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        async with Stage() as stage:
            (first,) = await stage.group(Role.DECODE, "d", 1, process=here(program.process.pid))
            second = RankPeer(stage, Role.DECODE, "d", 0, 1)
            await second.join()
            assert (await second.refused()).code == "contested"
            assert stage.member(first).alive
    finally:
        for hole in holes:
            os.close(hole)


# --- a new engine under an old name ----------------------------------------------------------


async def test_a_new_engine_never_hears_the_numbers_of_the_old_one() -> None:
    async with Stage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        await worker.move()
        process = stage.worker(prefill[0])
        process.immortal = True
        stage.died(prefill[0])
        assert await decode[0].failure(7) == "rank_lost"
        (new,) = await stage.group(Role.PREFILL, "p", 1)
        process.die("killed, at last")
        await eventually_async(
            lambda: not stage.service.rooms.unreleased or not stage.service.transfers.flights
        )
        new.cancel(8)
        await new.outcome(8)
        assert not new.outcomes(7)
        heard = [event.room for message in new.broadcasts for event in message.events]
        assert set(heard) == {8}
        assert [type(event) for event in new.events] == [Outcome, Released]


@pytest.mark.parametrize(("role", "reason"), [(Role.PREFILL, "rank_lost"), (Role.DECODE, "peer_restarted")])
async def test_whose_place_is_taken_fails_with_the_reason_of_its_side(role: Role, reason: str) -> None:
    """Case C07: the failure says which side has to be looked at."""
    async with Stage(config(rank={"heartbeat_s": 0.05, "lost_after_s": 60.0})) as stage:
        prefill, decode, _ = await stage.pair(auto=False)
        prefill[0].send_pages(7, 1)
        decode[0].offer(7, 1)
        old, other = (prefill[0], decode[0]) if role is Role.PREFILL else (decode[0], prefill[0])
        await turns()
        old.stop()
        new = RankPeer(stage, role, old.hello.group, 0, 1)
        await new.join()
        while not new.welcomed:
            await asyncio.sleep(0.05)
            new.again()
        assert await other.failure(7) == reason
        assert stage.member(new).alive
