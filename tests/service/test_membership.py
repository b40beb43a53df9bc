"""Ranks join, return, contest a place, and are lost."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.layout import DTYPE_BYTES, Layout
from coordinator.messages import Outcome, Pool, Process, Released, Role
from coordinator.reasons import Reason
from coordinator.worker.settings import POOL_PREFIX, new_pool_path
from tests.service.peers import LAYOUT, PAGES, RankPeer
from tests.service.stage import Stage, VirtualStage, config, now_s, turns, virtual_time
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Programs

HERE = (Path("/proc/sys/kernel/random/boot_id").read_text().strip(), Path("/proc/self/ns/pid").stat().st_ino)


def here(pid: int) -> Process:
    """A process that the coordinator can watch."""
    return Process(pid, *HERE)


async def insist(rank: RankPeer, pause_s: float) -> None:
    """Say hello again and again until it is welcomed, or refused for good; ten times at most."""
    for _ in range(10):
        if rank.welcomed or any(refused.fatal for refused in rank.refusals):
            return
        await asyncio.sleep(pause_s)
        rank.again()
        await turns()


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


@virtual_time
async def test_a_new_engine_is_not_asked_for_what_the_old_one_heard_last() -> None:
    """The old one acknowledges and leaves in one breath, and the group trims its log with nobody left."""
    async with VirtualStage() as stage:
        (old,) = await stage.group(Role.DECODE, "d", 1)
        old.acknowledges = False
        old.cancel(6)
        group = stage.service.membership.groups["d"]
        await eventually_async(lambda: group.log.head == 2)
        assert (group.stable, len(group.log)) == (0, 2)
        old.head = 2
        old.submit()
        old.leave()
        await turns()
        assert len(group.log) == 0
        new = RankPeer(stage, Role.DECODE, "d", 0, 1)
        await new.join()
        new.again()  # as after a line that was cut
        await turns()
        assert not new.refusals
        new.cancel(7)
        assert await new.failure(7) == "cancelled_by_decode"
        assert [event.room for event in new.events] == [7, 7]


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
        await insist(new, 0.05)
        assert await other.failure(7) == reason
        assert stage.member(new).alive


# --- who may join ----------------------------------------------------------------------------

REFUSALS = {
    "rank": ({"rank": 2}, "rank 2 does not exist in a group of world size 2"),
    "world size": ({"world_size": 4}, "group d is registered otherwise: world_size 2 != 4"),
    "role": ({"role": Role.PREFILL}, "group d is registered otherwise: role decode != prefill"),
    "backend": ({"backend": "nixl"}, "backend: this coordinator uses 'loopback', the rank has 'nixl'"),
    "endpoint": (
        {"endpoint": b""},
        "endpoint: a decode rank must say where its memory can be reached",
    ),
    "heads": (
        {"layout": Layout(2, 16, 7, 8, "float16")},
        "layout: kv_heads is 7, must divide by the 2 TP ranks, or they by it",
    ),
    "dtype": (
        {"layout": Layout(2, 16, 8, 8, "float17")},
        f"layout: dtype is 'float17', must be one of {', '.join(DTYPE_BYTES)}",
    ),
    "pool": (
        {"pool": Pool("", 4096, PAGES)},
        f"pool: 64 pages of this layout are {LAYOUT.pool_bytes(PAGES, 2)} bytes, not 4096",
    ),
    "layout": (
        {"layout": Layout(3, 16, 8, 4, "float16")},
        "group d is registered otherwise: layout.layers 2 != 3, layout.head_size 8 != 4",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_rank_that_does_not_fit_is_refused_with_both_values(
    changes: dict[str, object], message: str
) -> None:
    """Case C47; and nobody else is harmed."""
    async with Stage() as stage:
        (first,) = [RankPeer(stage, Role.DECODE, "d", 0, 2)]
        await first.join()
        fields: dict[str, object] = {"role": Role.DECODE, "rank": 1, "world_size": 2} | changes
        role, number, world_size = (fields.pop(name) for name in ("role", "rank", "world_size"))
        second = RankPeer(stage, role, "d", number, world_size, **fields)  # type: ignore[arg-type]
        with capture() as log:
            await second.join()
        (refused,) = second.refusals
        assert (refused.code, refused.message, refused.fatal) == ("hello", message, True)
        assert [(line["event"], line["error"]) for line in log] == [("rank.refused", message)]
        assert stage.service.counters.refused == {"hello": 1}
        third = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await third.join()
        await eventually_async(lambda: stage.service.membership.groups["d"].ready)
        assert first.listening


async def test_a_group_that_fits_no_other_side_is_refused_naming_field_and_values() -> None:
    """Case C47."""
    async with Stage() as stage:
        await stage.group(Role.PREFILL, "p", 1)
        other = RankPeer(stage, Role.DECODE, "d", 0, 1, layout=Layout(2, 32, 8, 8, "bfloat16"))
        await other.join()
        assert other.refusals[0].message == (
            "does not fit p: page_tokens: prefill has 16, decode has 32; "
            "dtype: prefill has 'float16', decode has 'bfloat16'"
        )
        # With another prefill group that it fits, it is welcome.
        await stage.group(Role.PREFILL, "p2", 1, layout=other.hello.layout)
        again = RankPeer(stage, Role.DECODE, "d", 0, 1, layout=other.hello.layout)
        await again.join()
        assert again.welcomed


async def test_a_prefill_group_that_fits_no_decode_group_is_refused_in_the_same_way() -> None:
    """Case C47, from the other side."""
    async with Stage() as stage:
        await stage.group(Role.DECODE, "d", 1)
        other = RankPeer(stage, Role.PREFILL, "p", 0, 1, layout=Layout(3, 16, 8, 4, "float16", "together"))
        await other.join()
        assert other.refusals[0].message == (
            "does not fit d: layers: prefill has 3, decode has 2; head_size: prefill has 4, decode has 8; "
            "kv: prefill has 'together', decode has 'apart'"
        )


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
async def test_engines_of_other_sizes_are_welcome(world_size: int) -> None:
    async with Stage() as stage:
        await stage.group(Role.PREFILL, "p", 2)
        rank = RankPeer(stage, Role.DECODE, "d", 0, world_size)
        await rank.join()
        assert rank.welcomed


async def test_past_the_limit_of_groups_one_may_try_again() -> None:
    async with Stage(config(limits={"max_groups": 1})) as stage:
        await stage.group(Role.PREFILL, "p", 1)
        rank = RankPeer(stage, Role.DECODE, "d", 0, 1)
        await rank.join()
        (refused,) = rank.refusals
        assert (refused.code, refused.fatal) == ("full", False)
        assert refused.message == "limits.max_groups = 1 groups are registered"


@contextmanager
def pool_file(kind: str) -> Iterator[str]:
    """Something that is named as a pool, and is none."""
    path = Path(new_pool_path())
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/passwd")
        case _:
            path.write_bytes(b"x")
    try:
        yield str(path)
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


async def test_a_pool_that_cannot_be_mapped_is_refused(short_dir: Path) -> None:
    size_bytes = LAYOUT.pool_bytes(PAGES, 1)
    async with Stage() as stage:
        # As where the coordinator spawns the workers.
        spawning = stage.config.backend.model_copy(update={"hosting": "coordinator"})
        stage.service.membership._config = stage.config.model_copy(update={"backend": spawning})
        foreign, missing = "is no pool file of ours in /dev/shm", "cannot be seen from here (No such file"
        for path, message in {
            "": foreign,
            "/etc/passwd": foreign,
            f"{short_dir}/kv-coordinator-{32 * '0'}": foreign,
            f"{POOL_PREFIX}../../etc/passwd": foreign,
            f"{new_pool_path()}\n": foreign,
            new_pool_path(): missing,
        }.items():
            rank = RankPeer(stage, Role.PREFILL, "p", 0, 1, pool=Pool(path, size_bytes, PAGES))
            await rank.join()
            assert message in rank.refusals[0].message
            assert rank.refusals[0].fatal
        for kind, message in {
            "directory": "is not a regular file of the coordinator's user",
            "link": "is not a regular file of the coordinator's user",
            "short": f"has 1 bytes, not {size_bytes}",
        }.items():
            with pool_file(kind) as path:
                rank = RankPeer(stage, Role.PREFILL, "p", 0, 1, pool=Pool(path, size_bytes, PAGES))
                await rank.join()
                assert message in rank.refusals[0].message
    assert not stage.service.transfers.crews


# --- a second one in the same place ----------------------------------------------------------


@virtual_time
async def test_a_second_rank_with_the_same_number_is_refused_while_the_first_lives() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        second = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await second.join()
        (refused,) = second.refusals
        assert (refused.code, refused.fatal) == ("contested", False)
        await insist(second, 0.5)
        refused = second.refusals[-1]
        assert refused.code == "taken"
        assert refused.message.startswith("rank 1 of d is taken by pid 1, which is alive;")
        assert stage.service.counters.ranks_lost == 0
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        assert (await decode[1].outcome(7)).succeeded


@virtual_time
async def test_a_silent_rank_loses_its_place_to_a_new_process() -> None:
    """Case C07: its handoffs fail with peer_restarted, the new one's succeed."""
    async with VirtualStage() as stage:
        prefill, decode, workers = await stage.pair(2, auto=False)
        for rank in decode:
            rank.offer(7, 1)
        for rank in prefill:
            rank.send_pages(7, 1)
        moves = [await worker.move() for worker in workers]
        decode[1].stop()
        second = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await second.join()
        asked_s = now_s()
        await insist(second, 0.5)
        assert second.welcomed
        assert now_s() - asked_s == pytest.approx(3, abs=1)
        for rank in [*prefill, decode[0], second]:
            assert await rank.failure(7) == "peer_restarted"
        # Prefill's pages are quiet when its workers say so; nothing lands in the old process any more.
        for worker, move in zip(workers, moves, strict=True):
            worker.failed(move, "disconnected")
            worker.auto = True
            worker.connect_all()
        for rank in [*prefill, decode[0], second]:
            await rank.release(7)
            rank.drain()
        # The old one was stopped, not dead: it is told, and changes nothing.
        decode[1].resume()
        await eventually_async(lambda: decode[1].refusals)
        for rank in (decode[0], second):
            rank.offer(8, 1)
        for rank in prefill:
            rank.send_pages(8, 1)
        for rank in [*prefill, decode[0], second]:
            assert (await rank.outcome(8)).succeeded
            rank.drain()
        await stage.empty()


@virtual_time
async def test_a_new_engine_of_another_shape_may_take_the_name_of_one_that_is_lost() -> None:
    async with VirtualStage() as stage:
        old = await stage.group(Role.DECODE, "d", 2)
        for rank in old:
            rank.stop()
        newcomer = RankPeer(stage, Role.DECODE, "d", 0, 1)
        await newcomer.join()
        assert newcomer.refusals[0].message == "group d is registered otherwise: world_size 2 != 1"
        await asyncio.sleep(16)
        newcomer.again()
        await eventually_async(lambda: newcomer.welcomed)
        old[0].resume()
        await turns()
        assert old[0].refusals[0].message == "group d is registered otherwise: world_size 1 != 2"
        newcomer.cancel(7)
        assert await newcomer.failure(7) == "cancelled_by_decode"


@pytest.mark.parametrize("hears", [True, False])
async def test_a_rank_of_an_engine_that_was_taken_for_dead_is_told_to_start_anew(*, hears: bool) -> None:
    """Whether it had heard something, or only said something."""
    async with Stage() as stage:
        (old,) = await stage.group(Role.DECODE, "d", 1)
        old.acknowledges = hears
        old.cancel(7)
        if hears:
            await old.outcome(7)
        await eventually_async(lambda: stage.member(old).received)
        await turns()
        stage.died(old)
        assert not stage.service.membership.groups
        old.resume()
        old.again()
        refused = await old.refused()
        assert (refused.code, refused.fatal) == ("hello", True)
        assert refused.message == "d/0 was taken for dead, and its place was given up; restart it"
        assert not stage.service.membership.groups
        (new,) = await stage.group(Role.DECODE, "d", 1)
        old.again()
        assert (await old.refused()).fatal
        new.cancel(8)
        await new.outcome(8)


# --- silence and goodbye ---------------------------------------------------------------------


@virtual_time
async def test_a_rank_that_returns_with_one_word_and_says_no_other_is_lost_again() -> None:
    async with VirtualStage() as stage:
        (rank,) = await stage.group(Role.DECODE, "d", 1)
        lost_after_s = stage.config.rank.lost_after_s
        for losses in (1, 2):
            rank.stop()
            await asyncio.sleep(lost_after_s + 1)
            assert stage.service.counters.ranks_lost == losses
            assert stage.service.membership.groups["d"].incarnation == 1 + losses
            rank.again()
            await turns()
            assert stage.member(rank).alive


@virtual_time
@pytest.mark.parametrize(("role", "reason"), [(Role.PREFILL, "rank_lost"), (Role.DECODE, "peer_lost")])
async def test_a_rank_that_is_silent_for_too_long_is_lost(role: Role, reason: str) -> None:
    async with VirtualStage(config(rank={"lost_after_s": 15.0})) as stage:
        prefill, decode, _ = await stage.pair(2)
        for rank in decode:
            rank.offer(7, 1)
        prefill[0].open_room(7)
        prefill[1].open_room(7)
        await asyncio.sleep(100)
        assert 7 in stage.service.rooms.active
        silent = (prefill if role is Role.PREFILL else decode)[1]
        silent.stop()
        last_s = stage.member(silent).seen_at_s
        others = [rank for rank in prefill + decode if rank is not silent]
        for rank in others:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert (outcome.failure.reason, outcome.failure.origin) == (reason, silent.name)
            assert outcome.failure.message == f"{silent.name} gave no sign of life for 15 s"
            assert rank.when(Outcome, 7) == pytest.approx(last_s + 15, abs=0.01)
            rank.drain()
        assert not stage.service.membership.groups[silent.hello.group].ready
        # It was only slow: it hears what it missed, and its group goes on.
        silent.resume()
        assert await silent.failure(7) == reason
        await eventually_async(lambda: stage.service.membership.groups[silent.hello.group].ready)
        silent.drain()
        for rank in decode:
            rank.offer(8, 1)
        for rank in prefill:
            rank.send_pages(8, 1)
        for rank in prefill + decode:
            assert (await rank.outcome(8)).succeeded
            rank.drain()
        assert prefill[0].events == prefill[1].events
        assert decode[0].events == decode[1].events
        await stage.empty()


@virtual_time
async def test_a_rank_that_leaves_fails_the_handoffs_of_its_group_at_once() -> None:
    async with VirtualStage() as stage:
        prefill, decode, _ = await stage.pair(2)
        for rank in decode:
            rank.offer(7, 1)
        prefill[0].open_room(7)
        await turns()
        left_s = now_s()
        decode[1].leave("scaling down")
        for rank in [*prefill, decode[0]]:
            outcome = await rank.outcome(7)
            assert outcome.failure is not None
            assert outcome.failure.reason == "peer_lost"
            assert outcome.failure.message == "d/1 left: scaling down"
        assert now_s() == left_s
        assert stage.service.membership.groups["d"].missing() == ["d/1"]


@virtual_time
async def test_a_handoff_waits_for_a_rank_that_has_not_joined_yet() -> None:
    """Case C41: what was told before it came is told to it; case C33: it is named."""
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        decode = await stage.group(Role.DECODE, "d", 2)
        first = RankPeer(stage, Role.PREFILL, "p", 0, 2)
        with capture() as log:
            await first.join()
        assert log.of("rank.joined")[0]["missing"] == ["p/0", "p/1"]
        assert stage.service.membership.groups["p"].missing() == ["p/1"]
        first.cancel(6)
        await first.outcome(6)
        for rank in decode:
            rank.offer(7, 1)
        first.send_pages(7, 1)
        await asyncio.sleep(30)
        second = RankPeer(stage, Role.PREFILL, "p", 1, 2)
        await second.join()
        assert await second.failure(6) == "cancelled_by_prefill"
        await eventually_async(lambda: stage.service.membership.groups["p"].ready)
        await stage.workers()
        second.send_pages(7, 1)
        for rank in (first, second, *decode):
            assert (await rank.outcome(7)).succeeded
        assert first.events == second.events


# --- who has heard what ----------------------------------------------------------------------


@virtual_time
async def test_stable_is_what_every_live_rank_has() -> None:
    async with VirtualStage() as stage:
        ranks = await stage.group(Role.DECODE, "d", 4)
        ranks[1].acknowledges = False
        for room in range(1, 6):
            ranks[0].cancel(room)
        await ranks[0].outcome(5)
        await asyncio.sleep(2)
        group = stage.service.membership.groups["d"]
        assert (group.log.head, group.stable, ranks[0].stable) == (10, 0, 0)
        assert len(group.log) == 10
        ranks[1].acknowledges = True
        ranks[1].again()
        await ranks[1].outcome(5)
        await asyncio.sleep(2)
        assert (group.stable, ranks[0].stable, len(group.log)) == (10, 10, 0)
        assert ranks[1].events == ranks[0].events == ranks[2].events


@virtual_time
async def test_a_rank_that_acknowledges_nothing_is_lost_before_the_log_grows_without_bound() -> None:
    async with VirtualStage(config(limits={"backlog_events": 100}, rank={"lost_after_s": 15.0})) as stage:
        ranks = await stage.group(Role.DECODE, "d", 2)
        ranks[1].acknowledges = False
        group = stage.service.membership.groups["d"]
        kept = []
        for room in range(1, 200):
            ranks[0].cancel(room)
            await ranks[0].outcome(room)
            ranks[0].drain()
            await asyncio.sleep(0.5)
            kept.append(len(group.log))
        # It gives signs of life, and hears nothing: 50 handoffs fill the log, 30 more take 15 s.
        assert stage.service.counters.ranks_lost == 1
        assert max(kept) == pytest.approx(100 + 2 * 30, abs=4)
        assert kept[-1] <= 100
        # What it missed is not kept any more.
        ranks[1].again()
        await turns()
        assert ranks[1].refusals[-1].code == "behind"
        assert ranks[1].refusals[-1].fatal
        assert len(ranks[0].outcomes()) == 199


@virtual_time
async def test_an_engine_that_dies_while_a_rank_holds_up_its_log_leaves_nothing_behind() -> None:
    async with VirtualStage(config(limits={"backlog_events": 10})) as stage:
        ranks = await stage.group(Role.DECODE, "d", 2)
        ranks[1].acknowledges = False
        for room in range(1, 21):
            ranks[0].cancel(room)
        await ranks[0].heard(20, Released)
        assert stage.service.membership._overflows
        for rank in ranks:
            stage.died(rank)
        assert not stage.service.membership.groups
        assert not stage.service.membership._overflows


@virtual_time
async def test_nobody_is_lost_because_everything_failed_in_one_instant() -> None:
    """Case C24: more verdicts at once than a log may hold for long."""
    async with VirtualStage(config(limits={"backlog_events": 100})) as stage:
        ranks = await stage.group(Role.PREFILL, "p", 2)
        for room in range(1, 501):
            ranks[0].open_room(room)
        await eventually_async(lambda: len(stage.service.rooms.active) == 500)
        stage.service.rooms.fail_all(set(stage.service.rooms.active.values()), Reason.DRAINING, "all at once")
        for rank in ranks:
            await rank.heard(500, Released)
            rank.drain()
        assert stage.service.counters.ranks_lost == 0
        assert ranks[0].events == ranks[1].events
        await stage.empty()


@virtual_time
async def test_a_rank_that_never_joins_does_not_let_the_log_grow_without_bound() -> None:
    async with VirtualStage(config(limits={"backlog_events": 100})) as stage:
        first = RankPeer(stage, Role.DECODE, "d", 0, 2)
        await first.join()
        for room in range(1, 301):
            first.cancel(room)
        await first.heard(300, Released)
        first.cancel(301)
        await first.outcome(301)
        group = stage.service.membership.groups["d"]
        assert len(group.log) <= 100
        # It gets what is kept.
        second = RankPeer(stage, Role.DECODE, "d", 1, 2)
        await second.join()
        await second.outcome(301)
        assert second.events == first.events[-len(second.events) :]
