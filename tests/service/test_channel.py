"""A socket in the event loop: nothing is lost, nobody is starved, errors do not stop it."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

from coordinator.channel import BATCH, Channel
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def line(on_message: Callable[[list[bytes]], None]) -> Iterator[tuple[Channel, zmq.Socket[bytes]]]:
    """A channel on a PAIR, and the other end of it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.setsockopt(zmq.RCVHWM, 0)
    theirs.setsockopt(zmq.SNDHWM, 0)
    ours.bind("inproc://line")
    theirs.connect("inproc://line")
    channel = Channel(ours, on_message)
    channel.start()
    try:
        yield channel, theirs
    finally:
        channel.close()
        context.destroy(linger=0)


async def test_everything_arrives_in_order_however_many_come_at_once() -> None:
    got: list[bytes] = []
    with line(lambda frames: got.append(frames[0])) as (_, theirs):
        sent = [number.to_bytes(4, "little") for number in range(5 * BATCH)]
        for frame in sent:
            theirs.send(frame)
        await eventually_async(lambda: len(got) == len(sent))
        assert got == sent


async def test_a_send_does_not_swallow_what_arrived_meanwhile() -> None:
    """The descriptor is edge-triggered: a send may consume the edge of a message that came in."""
    got: list[bytes] = []
    with line(lambda frames: got.append(frames[0])) as (channel, theirs):
        for number in range(200):
            theirs.send(b"%d" % number)
            assert channel.send([b"answer"])
            await asyncio.sleep(0)
        await eventually_async(lambda: len(got) == 200)


async def test_others_get_their_turn_between_slow_messages() -> None:
    """Case C49: page lists of half a million pages must not hold up the clocks."""
    handled = 0

    def slow(_frames: list[bytes]) -> None:
        nonlocal handled
        handled += 1
        until_s = time.monotonic() + 0.002
        while time.monotonic() < until_s:
            pass

    with line(slow) as (_, theirs):
        for _ in range(100):
            theirs.send(b"")
        await eventually_async(lambda: handled)
        # This test had its turn before all of them were handled.
        assert handled < 20
        await eventually_async(lambda: handled == 100)


async def test_an_error_in_a_handler_reaches_the_loop_and_the_next_message_the_handler() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    got: list[bytes] = []

    def fragile(frames: list[bytes]) -> None:
        if frames[0] == b"bad":
            raise ValueError(frames)
        got.append(frames[0])

    with line(fragile) as (_, theirs):
        for frame in (b"1", b"bad", b"2", b"bad", b"3"):
            theirs.send(frame)
        await eventually_async(lambda: len(got) == 3)
        assert got == [b"1", b"2", b"3"]
        assert [type(error) for error in errors] == [ValueError, ValueError]


async def test_a_closed_channel_is_quiet() -> None:
    got: list[bytes] = []
    with line(lambda frames: got.append(frames[0])) as (channel, theirs):
        theirs.send(b"too late")
        channel.close()
        channel.close()
        assert not channel.send([b"nobody hears it"])
        await asyncio.sleep(0.01)
        assert not got
