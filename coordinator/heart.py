"""Looks four times a second how late the event loop is, and tells a service manager that it turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.metrics import Histogram

#: Between two looks.
BEAT_S: Final = 0.25


async def beat(lag_s: Histogram, alive: Callable[[], None]) -> None:
    """Measure the lag, and call ``alive`` at each look, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + BEAT_S
        await asyncio.sleep(BEAT_S)
        lag_s.observe(max(0.0, loop.time() - due_s))
        alive()
