"""The log as a stream: everybody who follows gets it, and nobody who is slow slows anybody."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from coordinator import logs
from coordinator.http import stream
from coordinator.log_stream import MAX_WAITING, Wanted
from coordinator.logs import get_logger
from coordinator.messages import Role
from tests.http.served import served
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import aiohttp

    from tests.http.served import Served


@pytest.fixture(autouse=True)
def log_into_a_file(tmp_path: Path) -> Iterator[None]:
    """As a process has it, but into a file; what pytest has is put back."""
    import logging  # noqa: PLC0415 - only to put back what it has

    import structlog  # noqa: PLC0415 - as above

    root = logging.getLogger()
    handlers, level, processors = root.handlers[:], root.level, structlog.get_config()["processors"][:]
    with (tmp_path / "stdout").open("w") as file:
        logs.configure("info", "json", file)
        yield
        logs.close()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    structlog.get_config()["processors"][:] = processors
    logs.set_level("warning")
    root.setLevel(level)


class Reading:
    """What a follower has been sent, event by event."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The name and the data of the next event."""
        name = "message"
        async with asyncio.timeout(10):
            while True:
                line = (await self.answer.content.readline()).decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    return name, json.loads(line.removeprefix("data: "))

    async def entry(self) -> dict[str, Any]:
        """The next line of the log."""
        name, data = await self.next()
        assert name == "message"
        return data


@asynccontextmanager
async def following(it: Served, query: str = "") -> AsyncIterator[Reading]:
    async with it.client.get(f"{it.server.url}/v1/events{query}") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        await answer.content.readline()
        yield Reading(answer)


async def test_the_trail_of_a_handoff_comes_as_it_happens() -> None:
    async with served() as it, following(it) as all_of_it, following(it, "?room=2") as of_a_room:
        (rank,) = await it.stage.group(Role.DECODE, "d", 1)
        for room in (1, 2):
            rank.offer(room, room)
        while (entry := await all_of_it.entry())["event"] != "handoff.opened":
            pass
        assert entry["room"] == 1
        assert (await of_a_room.entry())["room"] == 2
        assert (await it.get("/v1/status"))["log_followers"] == 2


async def test_a_follower_may_want_more_than_the_log_does() -> None:
    async with served() as it, following(it, "?level=debug") as more, following(it, "?level=error") as less:
        log = get_logger()
        log.debug("test.detail")
        log.error("test.failure")
        assert (await more.entry())["event"] == "test.detail"
        assert (await less.entry())["event"] == "test.failure"
        lines = await it.get("/v1/logs?level=debug")
        assert "test.failure" in lines
        assert "test.detail" not in lines, "what the log itself did not want is not kept"
    await eventually_async(lambda: logs._State.threshold == logs._INFO, what="debug lines cost nothing again")


async def test_the_last_lines_are_kept_and_can_be_chosen() -> None:
    async with served() as it:
        log = get_logger()
        for number in range(30):
            log.info("test.line", number=number, rank=f"g{number % 2}/0")
        log.warning("test.warned", group="g0")
        lines = [json.loads(line) for line in (await it.get("/v1/logs?count=5&group=g1")).splitlines()]
        assert [line["number"] for line in lines] == [21, 23, 25, 27, 29]
        (line,) = (await it.get("/v1/logs?level=warning")).splitlines()
        assert json.loads(line)["event"] == "test.warned"
        async with following(it, "?backlog=1") as reading:
            assert (await reading.entry())["event"] == "test.warned"


async def test_a_reader_that_does_not_read_loses_lines_and_is_told_and_others_are_not_slowed() -> None:
    async with served() as it, following(it) as slow:
        follower = next(iter(it.server._routes.streams._followers))
        log = get_logger()
        lost = 0
        async with asyncio.timeout(20):
            # Its socket and its queue fill up while it does not read.
            while not lost:
                for _ in range(500):
                    log.info("test.flood", text="x" * 2000)
                await asyncio.sleep(0)
                lost = follower.dropped
        assert len(follower._lines) <= MAX_WAITING
        assert (await it.get("/healthz"))["ok"], "others are served meanwhile"
        while True:
            name, data = await slow.next()
            if name == "dropped":
                break
        assert data["lines"] >= lost


async def test_a_follower_that_goes_leaves_nothing_behind() -> None:
    async with served() as it:
        async with following(it):
            assert len(it.server._routes.streams) == 1
        log = get_logger()

        def gone() -> bool:
            log.info("test.tick")  # a broken line is noticed by what is written to it
            return not len(it.server._routes.streams)

        await eventually_async(gone)
        assert len(logs._State.outlets) == 1, "only the last lines are kept"


async def test_there_is_a_bound_on_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_FOLLOWERS", 1)
    async with served() as it, following(it):
        assert "no more are admitted" in (await it.get("/v1/events", 503))["error"]


async def test_followers_end_with_the_coordinator() -> None:
    async with served() as it, following(it) as reading:
        await it.server.stop()
        async with asyncio.timeout(5):
            while await reading.answer.content.readline():
                """What was on its way."""
        assert len(it.server._routes.streams) == 0


def test_a_line_is_chosen_by_its_whole_room_number() -> None:
    wanted = Wanted(room=4711)
    assert wanted(b'{"event":"x","room":4711,"a":1}')
    assert wanted(b'{"event":"x","room":4711}')
    assert not wanted(b'{"event":"x","room":47110}')
    by_group = Wanted(group="p")
    assert by_group(b'{"group":"p"}')
    assert by_group(b'{"rank":"p/0"}')
    assert not by_group(b'{"group":"pp"}')
