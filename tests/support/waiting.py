"""Waiting for something to become true, with a bound; tests never just sleep."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: How often a condition is looked at.
POLL_S: Final = 0.01


def eventually(condition: Callable[[], T], timeout_s: float = 5.0, what: str = "") -> T:
    """Return the first true value of ``condition()``.

    Args:
        condition: called every 10 ms in this thread; for conditions outside of an event loop.
        timeout_s: how long to wait.
        what: named when it stays false.

    Raises:
        AssertionError: it stayed false for ``timeout_s``.

    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(_failure(what or condition, timeout_s, value))
        time.sleep(POLL_S)


async def eventually_async(condition: Callable[[], T], timeout_s: float = 5.0, what: str = "") -> T:
    """Do the same inside an event loop, on the loop's own clock; virtual time passes at once."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    pause_s = POLL_S
    while True:
        value = condition()
        if value:
            return value
        if loop.time() > deadline_s:
            raise AssertionError(_failure(what or condition, timeout_s, value))
        await asyncio.sleep(pause_s)
        # Ever more rarely: an hour of virtual time is a few steps, and still to within a quarter.
        pause_s = min(pause_s * 1.25, timeout_s / 20)


def _failure(what: object, timeout_s: float, value: object) -> str:
    return f"did not come true within {timeout_s:g} s: {what} (last value: {value!r})"
