"""Listens, lets in who may come in, and turns every error into an answer."""

from __future__ import annotations

import asyncio
import hmac
from importlib import resources
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aiohttp import web

from coordinator import addresses
from coordinator.errors import ConfigError
from coordinator.exposition import Exposition
from coordinator.http import openapi
from coordinator.http.answers import Problem
from coordinator.http.connections import IDLE_S, Connections, give_up_dead_hosts, protocol_log
from coordinator.http.parameters import BadRequestError
from coordinator.http.routes import TABLE, Routes, reply
from coordinator.http.views import Views
from coordinator.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from coordinator.actions import Actions
    from coordinator.config import Http
    from coordinator.overview import Overview

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES: Final = 64 << 10
#: An idle connection is closed in good order after this share of its time.
KEPT_ALIVE: Final = 0.8
#: How long answers that are being given may take when the coordinator ends.
FAREWELL_S: Final = 0.5
MIN_TOKEN: Final = 16
_KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
#: The page loads nothing from anywhere else, and runs inside no other page.
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

_log = get_logger()


class HttpServer:
    """Serves operators; ``start`` it in the coordinator's loop, ``stop`` it in the same.

    Attributes:
        url: where it is served, once it is.

    """

    def __init__(self, config: Http, overview: Overview, actions: Actions) -> None:
        """Describe it.

        Raises:
            ConfigError: the token's file cannot be used.

        """
        self.url = ""
        self._address = addresses.split(f"tcp://{config.address}")
        self._token = _token(config)
        self._overview = overview
        self._routes = Routes(Views(overview), actions, Exposition(overview), openapi.describe())
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections: Connections

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.

        """
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for route in TABLE:
            app.router.add_route(route.method, route.path, self._routes.handler(route))
        _add_page(app)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=protocol_log,
            handle_signals=False,
            shutdown_timeout=FAREWELL_S,
            handler_cancellation=True,
            keepalive_timeout=KEPT_ALIVE * IDLE_S,
            # A few bytes may become very many, and the loop would stand still for all of them.
            auto_decompress=False,
        )
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - it was set up
        self._connections = Connections(self._runner.server)
        try:
            self._server = await self._listen()
        except OSError as error:
            text = f"{self._address.host}:{self._address.port}"
            problem = f"http.address: cannot listen on {text}: {error.strerror or error}"
            await self._runner.cleanup()
            raise ConfigError([problem]) from error
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{self._address.host}:{port}"
        _log.info("http.ready", url=self.url, token=bool(self._token))

    async def _listen(self) -> asyncio.Server:
        host = self._address.host.strip("[]")
        server = await asyncio.get_running_loop().create_server(
            self._connections, None if host == "*" else host, self._address.port
        )
        give_up_dead_hosts(server)
        return server

    async def stop(self) -> None:
        """Stop listening, and end the followers."""
        self._routes.streams.close()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and turn every error into an answer."""
        with self._connections.serving(request):
            return await self._answer(request, handler)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refused = self._refused(request)
            if refused is None and "Content-Encoding" in request.headers:
                refused = reply(Problem(error="the body must not be compressed"), 415)
            return refused if refused is not None else await handler(request)
        except BadRequestError as error:
            return reply(Problem(error=str(error)), 400)
        except web.HTTPException as error:
            return reply(Problem(error=f"{request.method} {request.path}: {error.reason}"), error.status)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the supervised door: a bug here costs one answer, and is told
            self._overview.counters.bugs += 1
            _log.error("http.broken", method=request.method, path=request.path, exc_info=error)
            return reply(Problem(error=f"a bug in the coordinator: {type(error).__name__}: {error}"), 500)

    def _refused(self, request: web.Request) -> web.Response | None:
        """Say why a request is not served.

        A browser can be made to send requests here by any page that it shows. So its requests must come from
        our own page; and where no token is needed, the host in them must be this one, not a name that
        somebody has made to point here.
        """
        try:
            host = addresses.split(
                f"tcp://{request.host}" if ":" in request.host else f"tcp://{request.host}:80"
            )
        except ValueError:
            return reply(Problem(error=f"the host {request.host!r} is none"), 403)
        if self._address.local and not self._token and not host.local:
            return reply(Problem(error=f"the host is {request.host!r}, must be a name of this computer"), 403)
        if request.method in {"GET", "HEAD"}:
            return None
        origin = request.headers.get("Origin")
        if origin is not None and _host_of(origin) != request.host:
            return reply(Problem(error=f"a page of {origin!r} must not change anything here"), 403)
        if self._token and not hmac.compare_digest(_bearer(request), self._token.encode()):
            return reply(Problem(error="needs the token: Authorization: Bearer TOKEN"), 401)
        return None


def _bearer(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # A header may hold any bytes.
    return token.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _token(config: Http) -> str:
    """Return the token that is needed; empty when none is."""
    path: Path | None = config.token_file
    if path is None:
        return config.token
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError([f"http.token_file: {path} cannot be read: {error}"]) from error
    if len(token) < MIN_TOKEN:
        raise ConfigError([f"http.token_file: {path} must hold at least {MIN_TOKEN} characters"])
    return token


def _add_page(app: web.Application) -> None:
    """Serve the page's files, which are read once."""
    for file in resources.files("coordinator.http").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix not in _KINDS:
            continue
        content, kind = file.read_bytes(), _KINDS[suffix]

        async def serve(_: web.Request, content: bytes = content, kind: str = kind) -> web.Response:
            return web.Response(body=content, content_type=kind, charset="utf-8", headers=_PAGE_HEADERS)

        app.router.add_get("/" if file.name == "index.html" else f"/page/{file.name}", serve)
