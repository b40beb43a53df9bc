"""The log as server-sent events. A slow reader loses lines and is told; nobody else is slowed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from aiohttp import web

from coordinator import logs
from coordinator.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.log_stream import Follower

#: Followers that are served at a time.
MAX_FOLLOWERS: Final = 64
#: Lines in one write.
_BATCH: Final = 200
#: Lines gather for this long, so that a busy log is written in few pieces.
_GATHER_S: Final = 0.05
#: A line of comment that shows both ends that the other one is there.
_PING_S: Final = 10.0
#: How long a reader may take nothing at all.
STALLED_S: Final = 60.0
#: What a reader that does not read may take of our memory, beside its queue; then writing waits.
_BUFFER_BYTES: Final = 256 << 10

_log = get_logger()


class Streams:
    """Serves followers, and ends them when the coordinator ends."""

    def __init__(self) -> None:
        """Start without any."""
        self._followers: set[Follower] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._followers)

    @property
    def full(self) -> bool:
        """Whether no more are admitted."""
        return self._closed or len(self._followers) >= MAX_FOLLOWERS

    def close(self) -> None:
        """Let all of them end."""
        self._closed = True
        for follower in self._followers:
            follower.wake()

    async def serve(
        self, request: web.Request, level: str, wanted: Callable[[bytes], bool], backlog: int
    ) -> web.StreamResponse:
        """Send the last ``backlog`` lines, then each line as it comes, until the reader goes or we end."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        follower = logs.follow(cast("logs.Level", level), wanted)
        self._followers.add(follower)
        try:
            await response.prepare(request)
            if request.transport is not None:
                request.transport.set_write_buffer_limits(_BUFFER_BYTES)
            await _write(response, b": the log follows\n\n" + _events(logs.last_lines(backlog, wanted)))
            while not self._closed:
                await follower.wait(_PING_S)
                lines, dropped = follower.take(_BATCH)
                told = b'event: dropped\ndata: {"lines":%d}\n\n' % dropped if dropped else b""
                await _write(response, told + _events(lines) or b": still here\n\n")
                await asyncio.sleep(_GATHER_S)
        except ConnectionError:
            pass  # the reader is gone
        except TimeoutError:
            _log.info("http.follower_stalled", stalled_s=STALLED_S)
            if request.transport is not None:
                request.transport.abort()
        finally:
            logs.unfollow(follower)
            self._followers.discard(follower)
        return response


async def _write(response: web.StreamResponse, text: bytes) -> None:
    """Write, and wait until the reader has taken so much that there is room for more.

    Raises:
        TimeoutError: it takes nothing.

    """
    async with asyncio.timeout(STALLED_S):
        await response.write(text)


def _events(lines: list[bytes]) -> bytes:
    return b"".join(b"data: " + line + b"\n\n" for line in lines)
