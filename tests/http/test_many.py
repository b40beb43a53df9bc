"""With 10,000 handoffs in flight every answer comes soon, and the loop is not held up."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import pytest

from coordinator.http.routes import EVENTS, TABLE
from coordinator.messages import Offer, Role, Send
from tests.http.served import served
from tests.service.peers import pages
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tests.http.served import Served

MANY: Final = 10_000
#: What is promised, on a host of two cores that has nothing else to do: answer, and stall of the loop.
ANSWER_S: Final = 0.2
STALL_S: Final = 0.02
#: This one runs other tests beside it. The best of several calls is looked at, and may take twice as long.
CALLS: Final = 5
SLACK: Final = 2


async def fill(it: Served) -> None:
    """Have 10,000 handoffs wait, half of them for decode and half for prefill."""
    (prefill,) = await it.stage.group(Role.PREFILL, "p", 1)
    (decode,) = await it.stage.group(Role.DECODE, "d", 1)
    await it.stage.workers()
    for start in range(1, MANY // 2 + 1, 1000):
        rooms = range(start, start + 1000)
        prefill.submit(*(Send(room, 0, pages(1), True, b"") for room in rooms))  # noqa: FBT003 - the last chunk
        decode.submit(*(Offer(MANY + room, 0, pages(1), 0) for room in rooms))
    await eventually_async(lambda: len(it.stage.service.rooms.active) == MANY, 30)


async def stalled(work: Awaitable[object]) -> tuple[float, float]:
    """How long something takes, and for how long at most the loop did not turn meanwhile; CPU time."""
    longest_s = 0.0
    over = False

    async def watch() -> None:
        nonlocal longest_s
        while not over:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)

    watching = asyncio.get_running_loop().create_task(watch())
    await asyncio.sleep(0)
    began_s = time.thread_time()
    await work
    took_s = time.thread_time() - began_s
    over = True
    await watching
    return took_s, longest_s


@pytest.mark.uvloop
async def test_every_answer_comes_soon_and_holds_nobody_up(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as it:
        await fill(it)
        paths = [r.path.format(room=1) for r in TABLE if r.method == "GET" and r.content != EVENTS]
        paths += ["/v1/handoffs?limit=1000", "/v1/handoffs?state=moving", "/v1/handoffs?reason=deadline"]
        figures = {}
        for path in paths:
            found = [await stalled(it.get(path)) for _ in range(CALLS)]
            figures[path] = min(took for took, _ in found), min(stall for _, stall in found)
        with capsys.disabled():
            for path, (took_s, stall_s) in figures.items():
                print(f"\n{path:32} {1000 * took_s:7.1f} ms, stall {1000 * stall_s:5.1f} ms", end="")  # noqa: T201 - to be read by a person
            print()  # noqa: T201 - as above
        slow = {p: f for p, f in figures.items() if f[0] > SLACK * ANSWER_S or f[1] > SLACK * STALL_S}
        assert not slow
