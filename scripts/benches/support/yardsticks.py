"""What asyncio and ZeroMQ cost by themselves on this host, now: what our figures are to be read against.

Hosts differ by factors, and one host does from minute to minute when others share it. The targets were
set on one where 10,000 tasks with a time-out that expire in one instant take 0.15 s, and a message reaches
8 processes in 0.37 ms.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import uvloop
import zmq

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: One message in each of an engine's steps.
STEP_S: Final = 0.01
_WARM: Final = 50
_PATIENCE_MS: Final = 30_000
_TOPIC: Final = b"engine\0"
_PAYLOAD: Final = bytes(100)


def task_us(count: int = 10_000) -> float:
    """CPU microseconds of starting and ending one task with a time-out, in a uvloop of its own."""

    async def wait(due_s: float, event: asyncio.Event) -> None:
        async with asyncio.timeout_at(due_s):
            await event.wait()

    async def measured() -> float:
        loop = asyncio.get_running_loop()
        began_s = time.thread_time()
        events = [asyncio.Event() for _ in range(count)]
        tasks = [loop.create_task(wait(loop.time() + 60.0, event)) for event in events]
        await asyncio.sleep(0)
        for event in events:
            event.set()
        await asyncio.gather(*tasks)
        return 1e6 * (time.thread_time() - began_s) / count

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measured())


def expiries_s(count: int = 10_000) -> float:
    """Seconds in which ``count`` tasks end whose time-outs passed in one instant."""

    async def wait(due_s: float) -> None:
        try:
            async with asyncio.timeout_at(due_s):
                await asyncio.Event().wait()
        except TimeoutError:
            return

    async def measured() -> float:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + 2.0
        tasks = [loop.create_task(wait(due_s)) for _ in range(count)]
        await asyncio.sleep(1.0)
        # All of them become overdue while nothing runs.
        time.sleep(1.5)  # noqa: ASYNC251 - on purpose
        began_s = time.monotonic()
        await asyncio.gather(*tasks)
        return time.monotonic() - began_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measured())


def lateness_ms(count: int, spread_s: float) -> float:
    """Milliseconds by which ``count`` time-outs come late that pass one after the other; 99th percentile."""

    async def wait(due_s: float, late_s: list[float]) -> None:
        try:
            async with asyncio.timeout_at(due_s):
                await asyncio.Event().wait()
        except TimeoutError:
            late_s.append(time.monotonic() - due_s)

    async def measured() -> float:
        begin_s = asyncio.get_running_loop().time() + 1.0
        late_s: list[float] = []
        await asyncio.gather(*(wait(begin_s + i * spread_s / count, late_s) for i in range(count)))
        return 1e3 * float(np.percentile(late_s, 99))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measured())


def broadcast_ms(ranks: int, messages: int) -> tuple[float, float, float]:
    """One message after the other from an XPUB to ``ranks`` processes that do nothing else.

    Returns:
        milliseconds until all have it, median and 99th percentile; and until the publisher has heard so
        of all, median.

    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvc-bare-") as directory, zmq.Context() as context:
        addresses = (f"ipc://{directory}/broadcast", f"ipc://{directory}/answers")
        publisher, answers = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        publisher.bind(addresses[0])
        answers.bind(addresses[1])
        pipes = [spawn.Pipe() for _ in range(ranks)]
        processes = [spawn.Process(target=_listen, args=(addresses, theirs, messages)) for _, theirs in pipes]
        try:
            for process in processes:
                process.start()
            for _ in range(ranks):
                _expect(publisher)
                publisher.recv()
            sent_s, answered_s = _publish(publisher, answers, ranks, messages)
            heard_s = np.array([ours.recv() for ours, _ in pipes]).max(axis=0)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
            publisher.close(0)
            answers.close(0)
    held_ms = 1e3 * (heard_s - sent_s)[_WARM:]
    answered_ms = 1e3 * (answered_s - sent_s)[_WARM:]
    return (
        float(np.percentile(held_ms, 50)),
        float(np.percentile(held_ms, 99)),
        float(np.percentile(answered_ms, 50)),
    )


def _publish(
    publisher: zmq.Socket[bytes], answers: zmq.Socket[bytes], ranks: int, messages: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    sent_s, answered_s = np.zeros(messages), np.zeros(messages)
    begin_s = time.monotonic() + 0.2
    for number in range(messages):
        time.sleep(max(0.0, begin_s + number * STEP_S - time.monotonic()))
        sent_s[number] = time.monotonic()
        publisher.send_multipart([_TOPIC, _PAYLOAD])
        for _ in range(ranks):
            _expect(answers)
            answers.recv_multipart()
        answered_s[number] = time.monotonic()
    return sent_s, answered_s


def _listen(addresses: tuple[str, str], driver: Connection, messages: int) -> None:
    """Be a process that hears ``messages``, answers each, and tells when each came."""
    with zmq.Context() as context:
        broadcast, answers = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        broadcast.setsockopt(zmq.SUBSCRIBE, _TOPIC)
        answers.connect(addresses[1])
        broadcast.connect(addresses[0])
        heard_s = []
        for _ in range(messages):
            _expect(broadcast)
            broadcast.recv_multipart()
            heard_s.append(time.monotonic())
            answers.send(b"")
        driver.send(heard_s)
        broadcast.close(0)
        answers.close(1000)


def _expect(socket: zmq.Socket[bytes]) -> None:
    if not socket.poll(_PATIENCE_MS):
        message = f"no message within {_PATIENCE_MS} ms"
        raise TimeoutError(message)
