"""Ready is only who can serve, and who is not says why (case C54)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.messages import Role
from coordinator.overview import STUCK_S
from tests.http.served import served
from tests.service.stage import VirtualStage, config, now_s, virtual_time
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from tests.http.served import Served


async def ready(it: Served, *reasons: str) -> None:
    """Ask for health and readiness: healthy, and ready unless there are reasons."""
    answer = await it.get("/readyz", 503 if reasons else 200)
    assert answer["ok"] is not bool(reasons)
    assert len(answer["reasons"]) == len(reasons)
    for found, expected in zip(answer["reasons"], reasons, strict=True):
        assert expected in found
    assert await it.get("/healthz") == {"ok": True, "reasons": []}


async def test_who_has_nothing_to_do_is_ready() -> None:
    async with served() as it:
        await ready(it)


async def test_a_dead_worker_is_named_until_it_is_back() -> None:
    async with served() as it:
        prefill, _, _ = await it.stage.pair(2)
        await ready(it)
        it.stage.worker(prefill[1]).die("killed by signal 11")
        await ready(it, "the worker of p/1 is not up: killed by signal 11")
        await it.stage.workers()
        await ready(it)


async def test_a_prefill_engine_that_lost_a_rank_is_named_and_a_decode_engine_is_not() -> None:
    async with served() as it:
        prefill, decode, _ = await it.stage.pair(2)
        it.stage.died(decode[0])
        await ready(it)
        it.stage.died(prefill[1])
        await ready(it, "group p misses p/1")


async def test_what_is_held_past_the_budget_is_a_reason() -> None:
    async with served(config(release={"quarantine_bytes": 1})) as it:
        prefill, decode, _ = await it.stage.pair(auto=False)
        decode[0].offer(1, 1)
        prefill[0].send_pages(1, 2)
        await eventually_async(lambda: it.stage.service.rooms.moving == 1)
        await ready(it)
        prefill[0].cancel(1)
        await prefill[0].outcome(1)
        await ready(it, "over release.quarantine_bytes (1)")


async def test_a_part_that_has_ended_turns_health_red() -> None:
    """Case C39, too: a dead reader turns health red."""
    async with served() as it:

        async def breaks() -> None:
            message = "out of luck"
            raise OSError(message)

        with capture("error") as log:
            it.stage.service.run_for_ever("the heartbeat", breaks())
            await eventually_async(lambda: it.stage.service.overview.broken)
        for path in ("/healthz", "/readyz"):
            answer = await it.get(path, 503)
            assert answer["reasons"] == ["the heartbeat has ended: OSError('out of luck')"]
        assert log.of("coordinator.broken")[0]["what"] == "the heartbeat"


@virtual_time
async def test_a_handoff_past_its_deadline_without_a_verdict_is_a_reason() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        (rank,) = await stage.group(Role.PREFILL, "p", 1)
        for room in (1, 2):
            rank.send_pages(room, room)
        await eventually_async(lambda: len(stage.service.rooms.past_prefill) == 2)
        handoff = stage.service.rooms.active[2]
        # As a bug would have it: nothing ends this one.
        assert handoff._clock is not None
        handoff._clock.reschedule(None)
        until_s = handoff.due_at_s
        await stage.workers()
        assert await rank.failure(1) == "deadline"
        await asyncio.sleep(until_s - now_s() + STUCK_S - 0.1)
        assert stage.service.overview.troubles() == []
        await asyncio.sleep(0.2)
        (trouble,) = stage.service.overview.troubles()
        assert trouble == "room 2 is 5.1 s past its deadline and has no verdict"


@virtual_time
async def test_a_handoff_that_decode_has_extended_is_not_stuck() -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        prefill, decode, _ = await stage.pair()
        prefill[0].send_pages(1, 1)
        await eventually_async(lambda: stage.service.rooms.past_prefill)
        decode[0].extend(1)
        await asyncio.sleep(50)
        decode[0].extend(1)
        await asyncio.sleep(50)
        assert list(stage.service.rooms.active) == [1]
        assert stage.service.overview.troubles() == []


async def test_a_dead_thread_turns_health_red() -> None:
    async with served() as it:
        it.stage.service.overview.parts["the authenticator of clients"] = lambda: False
        reasons = ["the authenticator of clients does not run any more"]
        assert (await it.get("/healthz", 503))["reasons"] == reasons
