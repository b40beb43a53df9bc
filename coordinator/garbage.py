"""Keeps Python's full garbage collections out of the event loop's busy moments.

A full collection looks at every object that lives: with 10,000 handoffs in flight it stopped the
loop for 50 to 220 ms, and deadlines were that late. Handoffs leave no cycles behind when they end, so
young collections find what there is; a full one comes now and then, when little is in flight.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: Allocations (net) per young collection, young per middle one, middle per full one: the last is so
#: many that ``sweep`` comes first.
THRESHOLDS: Final = (20_000, 50, 100_000)
SWEEP_S: Final = 60.0
#: With at most this many handoffs in flight a full collection takes a few milliseconds.
FEW: Final = 500


def settle() -> None:
    """Leave what was loaded at the start out of all collections to come; have few of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


async def sweep(in_flight: Callable[[], int]) -> None:
    """Collect everything now and then, when little is in flight, for ever."""
    while True:
        await asyncio.sleep(SWEEP_S)
        if in_flight() <= FEW:
            gc.collect()
