"""A configuration that is read again is applied as a whole, also to what is in flight, or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator import logs
from coordinator.config import Config, load
from coordinator.errors import ConfigError
from coordinator.messages import Role
from coordinator.reload import CHANGEABLE, Reload, changed
from tests.http.served import served
from tests.service.stage import VirtualStage, config, now_s, virtual_time
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from pathlib import Path

    from tests.service.stage import Stage


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration that says nothing yet."""
    path = tmp_path / "coordinator.toml"
    path.write_text("")
    return path


def write(file: Path, text: str | None) -> None:
    """Write the configuration, or remove it."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


def reloading(stage: Stage, file: Path, **handoff: float) -> Reload:
    """What reads ``file``; the coordinator believes that it was started with these bounds alone.

    A stage has addresses and a hosting that no file can have.
    """
    stage.service.config = config(handoff=dict(handoff))
    return Reload(file, stage.service)


@virtual_time
async def test_the_clocks_of_handoffs_in_flight_move(file: Path) -> None:
    async with VirtualStage(config(handoff={"deadline_s": 300.0})) as stage:
        (rank,) = await stage.group(Role.PREFILL, "p", 1)
        await stage.workers()
        for room in (1, 2):
            rank.send_pages(room, room)
        await eventually_async(lambda: len(stage.service.rooms.past_prefill) == 2)
        began_s = now_s()
        reload = reloading(stage, file, deadline_s=300.0)
        await asyncio.sleep(10)
        write(file, "[handoff]\ndeadline_s = 30.0\n")
        assert await reload() == ["handoff.deadline_s"]
        for room in (1, 2):
            assert await rank.failure(room) == "deadline"
        # Counted from prefill-complete, not from the reload.
        assert now_s() - began_s == pytest.approx(30, abs=1)


@virtual_time
async def test_a_longer_deadline_saves_those_in_flight_and_a_shorter_one_ends_the_overdue(file: Path) -> None:
    async with VirtualStage(config(handoff={"deadline_s": 60.0})) as stage:
        (rank,) = await stage.group(Role.PREFILL, "p", 1)
        await stage.workers()
        rank.send_pages(1, 1)
        await eventually_async(lambda: stage.service.rooms.past_prefill)
        began_s = now_s()
        reload = reloading(stage, file, deadline_s=60.0)
        write(file, "[handoff]\ndeadline_s = 600.0\n")
        await reload()
        await asyncio.sleep(100)
        assert 1 in stage.service.rooms.active
        write(file, "[handoff]\ndeadline_s = 50.0\n")
        await reload()
        assert await rank.failure(1) == "deadline"
        assert now_s() - began_s == pytest.approx(100, abs=2)


@virtual_time
async def test_every_other_bound_changes_for_what_is_under_way(file: Path) -> None:
    async with VirtualStage(config()) as stage:
        (decode,) = await stage.group(Role.DECODE, "d", 1)
        decode.offer(1, 1)
        await eventually_async(lambda: stage.service.rooms.active)
        write(
            file,
            "[handoff]\noffer_ttl_s = 20.0\nstall_s = 7.0\n[peer]\nconnect_s = 8.0\n"
            "[rank]\nlost_after_s = 9.0\n[release]\nsettle_s = 1.5\nquarantine_bytes = 77\n"
            "[limits]\nmax_handoffs = 5\n[shutdown]\ngrace_s = 3.0\n",
        )
        changes = await reloading(stage, file)()
        assert len(changes) == 8
        service = stage.service
        assert service.transfers._stalls.bound_s == 7.0
        assert service.transfers.routes._overdue.bound_s == 8.0
        assert service.membership._silence.bound_s == 9.0
        assert service.releases.bounds.settle_s == 1.5
        assert service.quarantine.budget_bytes == 77
        assert service.config.shutdown.grace_s == service.overview.config.shutdown.grace_s == 3.0
        began_s = now_s()
        assert await decode.failure(1) == "abandoned"
        assert now_s() - began_s < 21
        decode.drain()
        for room in range(2, 8):
            decode.offer(room, room)
        assert await decode.failure(7) == "rejected"
        assert len(service.rooms.active) == 5
        decode.stop()
        lost_s = now_s()
        await eventually_async(lambda: service.counters.ranks_lost == 1, 60)
        assert now_s() - lost_s < 11


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[listen]\nadvertise = "x"', "listen.advertise"),
        ("[rank]\nheartbeat_s = 0.5", "rank.heartbeat_s"),
        ("[limits]\nmax_frame_bytes = 16777216", "limits.max_frame_bytes"),
        ('[backend]\nname = "nixl"', "backend.name"),
        ('[http]\naddress = ""', "http.address"),
        ('[log]\nformat = "json"', "log.format"),
    ],
)
async def test_what_cannot_change_is_refused_by_name_and_nothing_is_applied(
    file: Path, text: str, key: str
) -> None:
    # As a process has it: a stage would have changed the addresses.
    async with served(path=file) as it:
        it.stage.service.config = Config()
        write(file, f"{text}\n[handoff]\ndeadline_s = 1.0\n")
        answer = await it.post("/v1/reload", 409)
        assert answer["error"] == f"{file}: {key}: cannot change while the coordinator runs; restart it"
        assert it.stage.service.rooms.bounds.deadline_s == 300.0
        assert it.stage.service.config == Config()


async def test_a_file_with_mistakes_is_refused_with_all_of_them(file: Path) -> None:
    async with served(path=file) as it:
        it.stage.service.config = Config()
        write(file, "[handoff]\ndeadline_s = 0\nstal_s = 1\n[release]\nsettle_s = 1.0\n")
        with capture("error") as log:
            answer = await it.post("/v1/reload", 409)
        assert [line.split(": ")[1] for line in answer["error"].splitlines()] == [
            "handoff.deadline_s",
            "handoff.stal_s",
        ]
        assert log.events == ["config.refused"]
        assert it.stage.service.releases.bounds.settle_s == 5.0
        write(file, None)
        assert "cannot be read" in (await it.post("/v1/reload", 409))["error"]


@pytest.mark.parametrize(
    "text",
    [
        '"handoff.deadline_s" = 100',
        f"a = {'[' * 3000}",
        f"[backend.options.nixl]\na{'.a' * 3000} = 1",
        '[http]\ntoken_file = "/\\u0000"',
    ],
    ids=["dotted", "nested", "tables", "null"],
)
async def test_whatever_is_in_the_file_is_refused_as_a_mistake(file: Path, text: str) -> None:
    async with served(path=file) as it:
        it.stage.service.config = Config()
        write(file, text)
        with capture("error") as log:
            await it.post("/v1/reload", 409)
        assert log.events == ["config.refused"]
        assert it.stage.service.counters.bugs == 0


async def test_without_a_file_there_is_nothing_to_read() -> None:
    async with served() as it:
        assert "without a file" in (await it.post("/v1/reload", 409))["error"]


async def test_the_logs_level_changes(file: Path) -> None:
    before = logs.level()
    try:
        async with served(path=file) as it:
            it.stage.service.config = load(file)
            write(file, '[log]\nlevel = "debug"\n')
            assert await it.post("/v1/reload") == {"changed": ["log.level"]}
            assert logs.level() == "debug"
            assert await it.post("/v1/reload") == {"changed": []}
    finally:
        logs.set_level(before)


def test_what_can_change_are_keys_that_there_are_and_what_has_changed_is_found() -> None:
    tables = Config().model_dump()
    for key in CHANGEABLE:
        table, _, name = key.partition(".")
        assert name in tables[table], key
    old, new = Config(), config(handoff={"stall_s": 1.0}, service={"name": "b"})
    assert list(changed(old, new)) == ["service.name", "handoff.stall_s"]


async def test_two_reloads_at_a_time_come_one_after_the_other(file: Path) -> None:
    async with served(path=file) as it:
        it.stage.service.config = Config()
        write(file, "[handoff]\ndeadline_s = 50.0\n")
        first, second = await asyncio.gather(it.actions.reload(), it.actions.reload())
        assert sorted([first, second]) == [[], ["handoff.deadline_s"]]
        with pytest.raises(ConfigError):
            await Reload(None, it.stage.service)()
