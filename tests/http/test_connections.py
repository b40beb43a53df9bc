"""What a client can take of the coordinator by being slow, silent, or many is bounded."""

from __future__ import annotations

import asyncio
import gzip
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import pytest
from aiohttp import http_parser

from coordinator.http import connections, routes, stream
from coordinator.logs import get_logger
from tests.http.served import served
from tests.support.logs import capture
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.http.served import Served

#: Instead of half a minute.
SHORT_S: Final = 0.3
GET: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Line:
    """A connection of a test's own, on which nothing is said by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, text: bytes = GET) -> bytes:
        """Say something; returns the answer's first line."""
        self.writer.write(text)
        return await self.line()

    async def line(self) -> bytes:
        """The next line that comes; empty when the connection ends."""
        async with asyncio.timeout(10):
            return await self.reader.readline()

    async def end(self) -> bytes:
        """Wait until the other side ends the connection; returns what came before."""
        try:
            async with asyncio.timeout(10):
                return await self.reader.read()
        except ConnectionError:
            return b""

    async def flood(self, text: bytes, enough: Callable[[], bool]) -> None:
        """Say something again and again."""
        async with asyncio.timeout(15):
            while not enough():
                if not self.writer.transport.is_closing():
                    self.writer.write(text)
                await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(it: Served) -> AsyncIterator[Line]:
    """Connect; little fits into the socket, so that who does not read soon holds up the other side."""
    host, _, port = it.server.url.removeprefix("http://").partition(":")
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.settimeout(0)
    await asyncio.get_running_loop().sock_connect(ours, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=ours, limit=4096)
    try:
        yield Line(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_there_is_a_bound_on_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with served() as it, AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(connected(it)) for _ in range(3)]
        await eventually_async(lambda: len(it.server._connections) == 3)
        with capture("warning") as log:
            for _ in range(2):
                async with connected(it) as one_too_many:
                    answer = await one_too_many.end()
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    assert b"too many connections" in answer
        assert log.events == ["http.full"], "it is not said for each of them"
        assert await lines[0].ask() == b"HTTP/1.1 200 OK\r\n", "those that are open are served"
        lines[1].writer.close()
        await eventually_async(lambda: len(it.server._connections) == 2)
        async with connected(it) as another:
            assert await another.ask() == b"HTTP/1.1 200 OK\r\n"


async def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", SHORT_S)
    async with served() as it, connected(it) as silent, connected(it) as slow:
        assert await silent.end() == b""
        for byte in GET:
            slow.writer.write(bytes([byte]))  # one by one: a sign of life, and no request
            await asyncio.sleep(SHORT_S / 10)
            if slow.reader.at_eof() or slow.writer.transport.is_closing():
                break
        assert await slow.end() == b""
        await eventually_async(lambda: not len(it.server._connections))


async def test_a_connection_is_used_again_and_again_for_longer_than_it_may_be_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 1.0)
    async with served() as it, connected(it) as line:
        for _ in range(5):
            assert await line.ask() == b"HTTP/1.1 200 OK\r\n"
            while await line.line() != b"\r\n":
                """The rest of the head."""
            async with asyncio.timeout(10):
                await line.reader.readexactly(len(b'{"ok":true,"reasons":[]}'))
            await asyncio.sleep(0.3)


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_S", SHORT_S)
    async with served() as it, connected(it) as line:
        head = b"POST /v1/handoffs/1/cancel HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        assert await line.ask(head) == b"HTTP/1.1 408 Request Timeout\r\n"
        assert (await it.get("/healthz"))["ok"]


@pytest.mark.parametrize(
    "request_line",
    [b"GET /healthz", b"GET /v1/nope", b"POST /v1/handoffs/1/cancel", b"POST /v1/drain"],
    ids=["get", "nothing", "body", "post"],
)
async def test_a_compressed_body_is_refused_as_it_is(
    request_line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a few bytes that become very many, and anybody may send it."""
    decompressed: list[object] = []
    monkeypatch.setattr(http_parser.DeflateBuffer, "feed_data", lambda _, *data: decompressed.append(data))
    bomb = gzip.compress(bytes(50 << 20))
    head = b"Host: localhost\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    async with served() as it, connected(it) as line:
        answer = await line.ask(request_line + b" HTTP/1.1\r\n" + head + bomb)
        assert answer == b"HTTP/1.1 415 Unsupported Media Type\r\n"
        assert not decompressed
        assert not it.stage.service.rooms.draining


async def test_a_body_without_end_ends_the_connection() -> None:
    """Nobody asks for it, so nobody reads it either."""
    async with served() as it, connected(it) as line:
        head = b"POST /v1/drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
        assert await line.ask(head) == b"HTTP/1.1 200 OK\r\n"
        with capture("info") as log:
            await line.flood(b"x" * 10_000, lambda: not len(it.server._connections))
        assert log.of("http.ended")[0]["why"] == "a request is too large"


async def test_requests_that_are_sent_without_waiting_for_answers_are_not_kept() -> None:
    async with served() as it, connected(it) as line:
        follow = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert await line.ask(follow) == b"HTTP/1.1 200 OK\r\n"  # and there will be no end of it
        taken_up = line.writer.transport.get_write_buffer_size
        await line.flood(GET * 100, lambda: taken_up() > 1 << 20 or not len(it.server._connections))


async def test_a_head_without_end_is_refused_and_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as it, connected(it) as line:
        line.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        field = b"X-Field: " + b"x" * 100 + b"\r\n"
        await line.flood(100 * field, lambda: not len(it.server._connections))
        answer = await line.end()
        assert b" 400 Bad Request" in answer[:30] or not answer
    assert not caplog.records


async def test_an_answer_that_is_not_taken_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", SHORT_S)
    async with served() as it, connected(it) as line:
        # More than sockets hold: the description is some 30 KiB long.
        await line.flood(
            b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
            lambda: not len(it.server._connections),
        )


async def test_a_follower_that_takes_nothing_at_all_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STALLED_S", SHORT_S)
    async with served() as it, connected(it) as line:
        await line.ask(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        log = get_logger()

        def gone() -> bool:
            for _ in range(200):
                log.error("test.flood", text="x" * 4000)
            return not len(it.server._routes.streams)

        await eventually_async(gone, 20.0)
        await eventually_async(lambda: not len(it.server._connections))


async def test_connections_end_with_the_coordinator() -> None:
    async with served() as it, connected(it) as line:
        await line.ask()
        await it.server.stop()
        await line.end()
        assert len(it.server._connections) == 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Origin: http://[\r\n", b"403"),
        (b"Origin: http://\xff\r\n", b"403"),
        (b"Authorization: Bearer \xff\r\n", b"401"),
    ],
)
async def test_no_header_is_a_bug_in_the_coordinator(head: bytes, status: bytes) -> None:
    async with served(token="s" * 20) as it, connected(it) as line:
        answer = await line.ask(b"POST /v1/drain HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n")
        assert answer.split()[1] == status
        assert it.stage.service.counters.bugs == 0


async def test_a_path_that_is_no_text_is_not_found() -> None:
    async with served() as it, connected(it) as line:
        answer = await line.ask(b"GET /%ff?%ff HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer == b"HTTP/1.1 404 Not Found\r\n"
        assert it.stage.service.counters.bugs == 0


@pytest.mark.parametrize("room", ["1_0", "%201", "+1", "%D9%A1", "-1", "1e3", ""])
async def test_a_room_is_written_in_digits(room: str) -> None:
    async with served() as it:
        await it.get(f"/v1/handoffs/{room}", 404 if not room else 400)
