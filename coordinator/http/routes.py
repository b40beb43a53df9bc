"""Every path, what it takes and what it answers. ``openapi`` describes this very table."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from coordinator import logs
from coordinator.actions import EndingError
from coordinator.errors import ConfigError
from coordinator.http import answers, parameters, stream
from coordinator.http.parameters import Parameter, query
from coordinator.http.views import Filter
from coordinator.log_stream import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.actions import Actions
    from coordinator.exposition import Exposition
    from coordinator.http.views import Views

#: What stands for a secret in what is shown.
SECRET: Final = "(secret)"  # noqa: S105 - the opposite of one
JSON: Final = "application/json"
JSON_LINES: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"
#: How long the body of a request may take.
BODY_S: Final = 10.0
_encode: Final = msgspec.json.Encoder().encode


class WhyCancelled(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a cancellation, which may be left out.

    Attributes:
        why: what every rank of both groups hears.

    """

    why: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """One path.

    Attributes:
        handler: the method of ``Routes`` that serves it.
        answer: what it answers, as JSON; None for another kind.
        content: the kind of what it answers.
        statuses: what else may come, each as a ``Problem`` unless it is in ``answer_statuses``.
        changes: whether it changes something, so that a token may be needed.

    """

    method: str
    path: str
    handler: str
    summary: str
    answer: type[answers.Answer] | Any = None
    content: str = JSON
    query: dict[str, Parameter] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=dict)
    also_answers: tuple[int, ...] = ()
    changes: bool = False
    body: type[msgspec.Struct] | None = None


_NOT_READY: Final = {503: "it is not: the reasons say why"}
_LOG_FILTER: Final = {
    "level": parameters.LEVEL,
    "room": parameters.ROOM,
    "group": parameters.GROUP,
}

TABLE: Final = (
    Route("GET", "/healthz", "healthz", "Whether the process works; where not, only its restart helps.",
          answers.Health, statuses=_NOT_READY, also_answers=(503,)),
    Route("GET", "/readyz", "readyz", "Whether it should get new requests now, and why not.",
          answers.Health, statuses=_NOT_READY, also_answers=(503,)),
    Route("GET", "/metrics", "metrics", "The metrics, in Prometheus' text format.", content="text/plain"),
    Route("GET", "/v1/status", "status", "The coordinator at a glance.", answers.Status),
    Route("GET", "/v1/handoffs", "handoffs",
          "Handoffs that are in flight or hold pages, the oldest first. With a reason, or the state "
          "succeeded or failed, those that ended lately as well.",
          answers.Handoffs,
          query={"state": parameters.STATE, "group": parameters.GROUP, "reason": parameters.REASON,
                 "older_s": parameters.OLDER_S, "after": parameters.AFTER, "limit": parameters.LIMIT}),
    Route("GET", "/v1/handoffs/{room}", "handoff",
          "The whole story of a room's last handoff, or how it ended when it is long over.",
          answers.Story | answers.Ended, statuses={404: "nothing is known of this room"}),
    Route("POST", "/v1/handoffs/{room}/cancel", "cancel",
          "Fail the handoff of a room: cancelled_by_operator. Its pages come back when they are quiet.",
          answers.Story, statuses={404: "nothing is known of this room", 408: "the body does not come",
                              409: "it has ended already", 413: "the body is too large"},
          changes=True, body=WhyCancelled),
    Route("GET", "/v1/groups", "groups", "The engines and their ranks.", answers.Groups),
    Route("GET", "/v1/peers", "peers", "The links from workers to decode ranks.", answers.Peers),
    Route("GET", "/v1/workers", "workers", "The workers, one for each prefill rank.", answers.Workers),
    Route("GET", "/v1/quarantine", "quarantine", "What failed handoffs hold because it is not quiet.",
          answers.Quarantine),
    Route("POST", "/v1/drain", "drain", "Admit no new handoffs; those in flight go on.",
          answers.Admission, changes=True),
    Route("POST", "/v1/resume", "resume", "Admit new handoffs again.", answers.Admission,
          statuses={409: "the coordinator is about to end"}, changes=True),
    Route("GET", "/v1/config", "config", "The configuration in use, without its secrets.", dict[str, Any]),
    Route("POST", "/v1/reload", "reload",
          "Read the configuration's file again, and apply all of it or nothing.",
          answers.Reloaded, statuses={409: "it cannot be used, or changes what cannot change"}, changes=True),
    Route("GET", "/v1/logs", "log", "The last lines of the log, as JSON, one a line.", content=JSON_LINES,
          query={**_LOG_FILTER, "count": parameters.COUNT}),
    Route("GET", "/v1/events", "events",
          "The lines of the log as they come, as server-sent events. What a slow reader loses is told to it "
          "as an event named dropped.",
          content=EVENTS, query={**_LOG_FILTER, "backlog": parameters.BACKLOG},
          statuses={503: "there are too many followers"}),
    Route("GET", "/openapi.json", "openapi", "This description.", dict[str, Any]),
)  # fmt: skip


class Routes:
    """Serves the paths of ``TABLE``."""

    def __init__(
        self, views: Views, actions: Actions, exposition: Exposition, description: dict[str, Any]
    ) -> None:
        """Look things up in ``views``, change them by ``actions``."""
        self.streams = stream.Streams()
        views.followers = self.streams.__len__
        self._views = views
        self._actions = actions
        self._exposition = exposition
        self._description = _encode(description)

    def handler(self, route: Route) -> Callable[[web.Request], Any]:
        """Return what serves a route."""
        return getattr(self, f"_{route.handler}")  # type: ignore[no-any-return]

    async def _healthz(self, request: web.Request) -> web.Response:
        query(request, {})
        return _health(self._views.overview.illness())

    async def _readyz(self, request: web.Request) -> web.Response:
        query(request, {})
        return _health(self._views.overview.troubles())

    async def _metrics(self, request: web.Request) -> web.Response:
        query(request, {})
        # The header as a whole: aiohttp would take the version in it for a parameter of its own.
        return web.Response(
            body=self._exposition.text(), headers={"Content-Type": self._exposition.content_type}
        )

    async def _status(self, request: web.Request) -> web.Response:
        query(request, {})
        return reply(self._views.status())

    async def _handoffs(self, request: web.Request) -> web.Response:
        asked = query(request, _QUERIES["handoffs"])
        limit = asked.pop("limit")
        return reply(await self._views.handoffs(Filter(**asked), limit))

    async def _handoff(self, request: web.Request) -> web.Response:
        query(request, {})
        room = parameters.room(request)
        story = self._views.story(room)
        return _unknown(room) if story is None else reply(story)

    async def _cancel(self, request: web.Request) -> web.Response:
        query(request, {})
        room = parameters.room(request)
        body = await _body(request)
        try:
            why = msgspec.json.decode(body, type=WhyCancelled).why if body else ""
        except msgspec.DecodeError as error:
            message = f"the body cannot be used: {error}"
            raise parameters.BadRequestError(message) from error
        if self._actions.cancel(room, why) is None:
            known = self._views.story(room) is not None
            return _problem(409, f"room {room} has ended already") if known else _unknown(room)
        return reply(self._views.story(room))

    async def _groups(self, request: web.Request) -> web.Response:
        query(request, {})
        return reply(self._views.groups())

    async def _peers(self, request: web.Request) -> web.Response:
        query(request, {})
        return reply(self._views.peers())

    async def _workers(self, request: web.Request) -> web.Response:
        query(request, {})
        return reply(self._views.workers())

    async def _quarantine(self, request: web.Request) -> web.Response:
        query(request, {})
        return reply(await self._views.quarantine())

    async def _drain(self, request: web.Request) -> web.Response:
        query(request, {})
        self._actions.drain()
        return reply(self._views.admission())

    async def _resume(self, request: web.Request) -> web.Response:
        query(request, {})
        try:
            self._actions.resume()
        except EndingError as error:
            return _problem(409, str(error))
        return reply(self._views.admission())

    async def _config(self, request: web.Request) -> web.Response:
        query(request, {})
        shown = self._views.overview.config.model_dump(mode="json")
        if shown["http"]["token"]:
            shown["http"]["token"] = SECRET
        for name, options in shown["backend"]["options"].items():
            # What they mean is known to the backend alone.
            shown["backend"]["options"][name] = {key: _redacted(key, value) for key, value in options.items()}
        return reply(shown)

    async def _reload(self, request: web.Request) -> web.Response:
        query(request, {})
        try:
            changed = await self._actions.reload()
        except ConfigError as error:
            return _problem(409, str(error))
        return reply(answers.Reloaded(changed=changed))

    async def _log(self, request: web.Request) -> web.Response:
        asked = query(request, _QUERIES["log"])
        wanted = _wanted(asked)
        lines = logs.last_lines(asked["count"], wanted)
        return web.Response(body=b"".join(line + b"\n" for line in lines), content_type=JSON_LINES)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        asked = query(request, _QUERIES["events"])
        if self.streams.full:
            return _problem(503, f"{len(self.streams)} followers are connected; no more are admitted")
        return await self.streams.serve(request, asked["level"], _wanted(asked), asked["backlog"])

    async def _openapi(self, request: web.Request) -> web.Response:
        query(request, {})
        return web.Response(body=self._description, content_type=JSON)


_QUERIES: Final = {route.handler: route.query for route in TABLE}


async def _body(request: web.Request) -> bytes:
    """Return the body, which must come soon.

    Raises:
        HTTPRequestTimeout: it does not.

    """
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error


def reply(answer: object, status: int = 200) -> web.Response:
    """Return an answer as JSON."""
    return web.Response(body=_encode(answer), status=status, content_type=JSON)


def _problem(status: int, error: str) -> web.Response:
    return reply(answers.Problem(error=error), status)


def _unknown(room: int) -> web.Response:
    return _problem(404, f"nothing is known of room {room}")


def _health(reasons: list[str]) -> web.Response:
    return reply(answers.Health(ok=not reasons, reasons=reasons), 503 if reasons else 200)


def _wanted(asked: dict[str, Any]) -> Callable[[bytes], bool]:
    least = parameters.LEVELS.index(asked["level"])
    about = Wanted(asked["room"], asked["group"] or "")
    if not least:
        return about
    levels = tuple(f'"level":"{level}"'.encode() for level in parameters.LEVELS[least:])
    return lambda line: about(line) and any(level in line for level in levels)


def _redacted(key: str, value: object) -> object:
    return SECRET if any(word in key.lower() for word in ("secret", "token", "password", "key")) else value
