"""One handoff leaves a trail in the log that an operator can read (no handler of it has to be asked)."""

from __future__ import annotations

import asyncio

import pytest

from tests.service.stage import Stage, VirtualStage, config, turns, virtual_time
from tests.support.logs import Captured, capture


def trail(log: Captured, room: int) -> list[dict[str, object]]:
    """The lines of one room."""
    return [line for line in log if line.get("room") == room and line["event"].startswith("handoff.")]


@virtual_time
async def test_a_success_from_the_first_word_to_the_release() -> None:
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        with capture() as log:
            prefill[0].open_room(7)
            await asyncio.sleep(100)
            for rank in decode:
                rank.offer(7, 1, 2)
            await asyncio.sleep(10)
            prefill[0].send_pages(7, 1, 2)
            await asyncio.sleep(5)
            prefill[1].send_pages(7, 1, 2)
            await asyncio.sleep(1)
            for worker in workers:
                worker.done(await worker.move())
            await prefill[0].release(7)
            await turns()
        lines = trail(log, 7)
        assert [line["event"] for line in lines] == [
            "handoff.opened", "handoff.prefill_complete", "handoff.moving", "handoff.outcome",
        ]  # fmt: skip
        opened, complete, moving, outcome = lines
        assert all((line["group"], line["room"], line["attempt"]) == ("p", 7, 1) for line in lines)
        assert all(line["decode"] == "d" for line in lines[1:])
        assert opened["total_s"] == 0
        assert complete["total_s"] == pytest.approx(110, abs=0.1)
        assert (moving["total_s"], moving["after_prefill_s"]) == pytest.approx((115, 5), abs=0.1)
        assert outcome["outcome"] == "succeeded"
        assert (outcome["total_s"], outcome["after_prefill_s"]) == pytest.approx((116, 6), abs=0.1)
        assert outcome["bytes"] == stage.service.counters.bytes_moved == 2 * 8 * 64
        assert outcome["held"] == (), "both sides were released with the verdict"


@virtual_time
async def test_a_failure_says_why_whose_and_how_long_its_pages_were_held() -> None:
    async with VirtualStage(
        config(handoff={"deadline_s": 60.0, "stall_s": 100.0}, release={"settle_s": 5.0, "drain_s": 2.0})
    ) as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        with capture() as log:
            decode[0].offer(7, 1)
            prefill[0].send_pages(7, 1)
            move = await worker.move()
            await prefill[0].outcome(7)
            worker.failed(move, "revoked")
            await decode[0].release(7)
            await turns()
        lines = trail(log, 7)
        assert [line["event"] for line in lines if line["event"] != "handoff.late"][:4] == [
            "handoff.opened", "handoff.prefill_complete", "handoff.moving", "handoff.outcome",
        ]  # fmt: skip
        outcome = next(line for line in lines if line["event"] == "handoff.outcome")
        assert outcome["outcome"] == "failed"
        assert outcome["reason"] == "deadline"
        assert outcome["message"] == "waited 60.0 s after prefill for the leg p/0 -> d/0"
        assert outcome["origin"] == ""
        assert outcome["bytes"] == 0
        released = [line for line in lines if line["event"] == "handoff.released"]
        assert [(line["side"], line["held_s"]) for line in released] == [
            ("prefill", pytest.approx(0, abs=0.1)),
            ("decode", pytest.approx(4.5, abs=1)),
        ]
        late = [line for line in lines if line["event"] == "handoff.late"]
        assert all(line["event_kind"] and line["state"] == "failed" for line in late)


@virtual_time
async def test_a_handoff_that_fails_as_it_begins_to_move_does_not_say_that_it_moves() -> None:
    async with VirtualStage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        stage.worker(prefill[0]).die("exit code 4 (backend)", hopeless=True)
        with capture() as log:
            decode[0].offer(7, 1)
            prefill[0].send_pages(7, 1)
            await decode[0].release(7)
            await turns()
        assert [line["event"] for line in trail(log, 7)] == [
            "handoff.opened", "handoff.prefill_complete", "handoff.outcome",
        ]  # fmt: skip
        assert not worker.moves()


@virtual_time
async def test_a_newcomer_past_a_limit_leaves_one_line() -> None:
    async with VirtualStage(config(limits={"max_offers": 1})) as stage:
        _, decode, _ = await stage.pair()
        with capture() as log:
            decode[0].offer(1, 1)
            decode[0].offer(2, 1)
            await decode[0].release(2)
        (line,) = trail(log, 2)
        assert (line["event"], line["group"], line["attempt"]) == ("handoff.outcome", "d", 1)
        assert (line["outcome"], line["reason"]) == ("failed", "rejected")


@virtual_time
async def test_what_happens_to_ranks_workers_and_peers_is_told() -> None:
    async with VirtualStage() as stage:
        with capture() as log:
            prefill, decode, _ = await stage.pair()
            stage.worker(prefill[0]).die("killed by signal 11")
            await stage.workers()
            decode[0].leave("scaling down")
            await turns()
        events = log.events
        for event in ("rank.joined", "group.ready", "worker.up", "peer.connected", "rank.left"):
            assert event in events, event
        (left,) = log.of("rank.left")
        assert (left["rank"], left["message"]) == ("d/0", "d/0 left: scaling down")
        (not_ready,) = log.of("group.not_ready")
        assert (not_ready["group"], not_ready["missing"]) == ("d", ["d/0"])


async def test_a_release_of_both_sides_at_once_is_at_most_one_line_in_real_time_too() -> None:
    async with Stage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        with capture() as log:
            for room in (1, 2):
                decode[0].offer(room, 1)
                prefill[0].send_pages(room, 1)
            worker.done(await worker.move(0))
            await prefill[0].release(1)
            decode[0].cancel(2)
            await prefill[0].outcome(2)
            worker.failed(await worker.move(1), "revoked", started=False)
            await prefill[0].release(2)
        # With the first one's verdict all was quiet: the line of the outcome says that.
        assert [(line["room"], line["held"]) for line in log.of("handoff.outcome")] == [
            (1, ()),
            (2, ("prefill", "decode")),
        ]
        assert [(line["room"], line["side"]) for line in log.of("handoff.released")] == [(2, "both")]


async def test_a_release_of_decode_before_prefill_is_two_lines() -> None:
    async with Stage() as stage:
        prefill, decode, (worker,) = await stage.pair(auto=False)
        with capture() as log:
            decode[0].offer(7, 1)
            prefill[0].send_pages(7, 1)
            move = await worker.move()
            stage.died(decode[0])
            worker.failed(move, "disconnected")
            await prefill[0].release(7)
        assert [line["side"] for line in log.of("handoff.released")] == ["decode", "prefill"]
