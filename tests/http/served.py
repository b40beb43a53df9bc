"""A coordinator of a stage, served over real HTTP in the test's own loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from coordinator.actions import Actions
from coordinator.config import Http
from coordinator.http.server import HttpServer
from coordinator.reload import Reload
from tests.service.stage import Stage, config
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from coordinator.config import Config

#: Where a stage's HTTP listens: any free port.
ANYWHERE: Final = {"address": "127.0.0.1:0"}


class Served:
    """A stage, its server, and a client.

    Attributes:
        stage: the coordinator and its peers.
        server: its HTTP.
        actions: what the server does to it.

    """

    def __init__(self, stage: Stage, http: Http, path: Path | None) -> None:
        self.stage = stage
        self.actions = Actions(stage.service.rooms, Reload(path, stage.service))
        self.server = HttpServer(http, stage.service.overview, self.actions)
        self.client: aiohttp.ClientSession

    async def call(
        self, method: str, path: str, status: int = 200, *, data: bytes | None = None, **headers: str
    ) -> Any:  # noqa: ANN401 - whatever JSON says
        """Call a path; returns the JSON, or the text, of an answer that must have this status."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(method, self.server.url + path, data=data, headers=names) as answer:
            text = await answer.text()
            assert answer.status == status, f"{method} {path}: {answer.status} {text}"
            return await answer.json() if answer.content_type == "application/json" else text

    async def get(self, path: str, status: int = 200) -> Any:  # noqa: ANN401 - as above
        """GET a path."""
        return await self.call("GET", path, status)

    async def post(self, path: str, status: int = 200, data: bytes | None = None) -> Any:  # noqa: ANN401 - as above
        """POST to a path."""
        return await self.call("POST", path, status, data=data)


@asynccontextmanager
async def served(
    settings: Config | None = None, path: Path | None = None, **http: object
) -> AsyncIterator[Served]:
    """Serve a stage with these settings; ``path`` is the file that a reload reads."""
    async with Stage(settings or config()) as stage:
        it = Served(stage, Http.model_validate({**ANYWHERE, **http}), path)
        await it.server.start()
        # Trust nothing of the environment: a proxy in it has no business here.
        async with aiohttp.ClientSession(
            trust_env=False, timeout=aiohttp.ClientTimeout(total=20)
        ) as it.client:
            try:
                yield it
            finally:
                await it.server.stop()


async def in_every_state(stage: Stage) -> dict[str, int]:
    """Bring handoffs into each state; returns a room for each, by what it shows."""
    prefill, decode, workers = await stage.pair(2, auto=False)
    rooms = {"open": 1, "waiting": 2, "moving": 3, "held": 4, "refused": 5}
    for rank in decode:
        rank.offer(rooms["open"], 1)
        rank.offer(rooms["moving"], 2)
        rank.offer(rooms["held"], 3)
    for rank in prefill:
        rank.send_pages(rooms["moving"], 1)
        rank.send_pages(rooms["held"], 2)
    prefill[0].send_pages(rooms["waiting"], 3)
    seen = stage.service.rooms
    await eventually_async(lambda: seen.moving == 2 and len(seen.active) == 4)
    for worker in workers:
        await worker.move(1)  # what has not reached a worker is not held
    prefill[0].cancel(rooms["held"], "the user is gone")
    prefill[0].open_room(rooms["refused"])
    prefill[1].cancel(rooms["refused"], "never mind")
    await prefill[0].outcome(rooms["held"])
    await prefill[0].outcome(rooms["refused"])
    return rooms
