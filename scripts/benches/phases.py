"""Where the time of a handoff goes, by the coordinator's own histograms and by what the ranks see.

One handoff at a time, between two ranks and two: of 64 KiB over loopback, of 64 MiB over NIXL (where it
is installed, else loopback), a table for each. Means, in microseconds:

    handoff_us    from the last rank's ``send`` until the last prefill rank has the outcome; the sum of
    messages_us   calls, verdicts and engines on their way: ranks to coordinator and back
    waiting_us    in the coordinator, from the first rank's prefill-complete until only bytes are missing
                  (``post_prefill_seconds`` less ``transfer_seconds``)
    transfer_us   orders to workers, the bytes, and the workers' reports (``transfer_seconds``)

The coordinator's clock ticks in milliseconds; over many handoffs that evens out.
"""

from __future__ import annotations

import time
from statistics import mean
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends import registry
from backends.base import BackendUnavailableError
from coordinator.client import DecodeRank, Layout, Outcome, PrefillRank
from coordinator.commands.caller import Caller
from coordinator.messages import Role
from scripts.benches.support.deployment import Deployment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from coordinator.messages import Event
    from scripts.benches import Arguments, Metrics
    from scripts.benches.support.deployment import RankHandle, Tables

_WORLD_SIZE: Final = 2
#: On each rank, 16 KiB a page in each of 64 planes: 1 MiB a page.
_LARGE: Final = Layout(layers=32, page_tokens=16, kv_heads=4 * _WORLD_SIZE, head_size=128, dtype="bfloat16")
#: The same with 2 planes of 8 KiB.
_SMALL: Final = Layout(layers=1, page_tokens=16, kv_heads=4 * _WORLD_SIZE, head_size=64, dtype="bfloat16")
_TABLES: Final[Tables] = {"http": {"address": "127.0.0.1:0"}}
_PATIENCE_S: Final = 60.0
#: For the others to be ready for the next one.
_PAUSE_S: Final = 0.002


class Case(NamedTuple):
    """What is handed over: pages of a rank, in a pool of a layout, by a backend."""

    table: str
    backend: str
    layout: Layout
    pages: int
    handoffs: int


class Histograms(NamedTuple):
    """How many verdicts there were, and the sums of the coordinator's histograms, seconds."""

    verdicts: float
    post_prefill_s: float
    transfer_s: float


def run(arguments: Arguments) -> Metrics:
    """Measure.

    Raises:
        SimulationError: a process failed.

    """
    few, many = (20, 100) if arguments.quick else (100, 1000)
    cases = (
        Case("loopback_64kib", "loopback", _SMALL, pages=2, handoffs=many),
        Case(f"{_fast()}_64mib", _fast(), _LARGE, pages=32, handoffs=few),
    )
    return {case.table: _measure(case) for case in cases}


def _fast() -> str:
    try:
        registry.load("nixl")
    except BackendUnavailableError:
        return "loopback"
    return "nixl"


def _measure(case: Case) -> dict[str, float]:
    with Deployment(__name__, _TABLES, backend=case.backend) as deployment:
        caller = Caller(deployment.url())
        ranks = [
            rank
            for role in Role
            for rank in deployment.start(role, role.value, _WORLD_SIZE, pages=case.pages, layout=case.layout)
        ]
        deployment.wait_ready()
        prefill, decode = ranks[:_WORLD_SIZE], ranks[_WORLD_SIZE:]
        # The first ones start workers, open links and touch the memory.
        _hand_over(prefill, decode, range(1, 6), case.pages)
        before = _histograms(caller)
        took_s = _hand_over(prefill, decode, range(6, 6 + case.handoffs), case.pages)
        after = _histograms(caller)
    verdicts = after.verdicts - before.verdicts
    post_prefill_us = 1e6 * (after.post_prefill_s - before.post_prefill_s) / verdicts
    transfer_us = 1e6 * (after.transfer_s - before.transfer_s) / verdicts
    handoff_us = 1e6 * mean(took_s)
    return {
        "handoffs": verdicts,
        "handoff_us": handoff_us,
        "messages_us": handoff_us - post_prefill_us,
        "waiting_us": post_prefill_us - transfer_us,
        "transfer_us": transfer_us,
    }


def _hand_over(
    prefill: Sequence[RankHandle], decode: Sequence[RankHandle], rooms: range, pages: int
) -> list[float]:
    """Hand over one after the other; how long each took as prefill saw it."""
    took_s = []
    for room in rooms:
        for rank in decode:
            rank.tell((room, pages, 0.0))
        for rank in decode:
            rank.hear(_PATIENCE_S)
        begin_s = time.monotonic() + _PAUSE_S
        for rank in prefill:
            rank.tell((room, pages, begin_s))
        times = [rank.hear(_PATIENCE_S) for rank in (*prefill, *decode)][: len(prefill)]
        took_s.append(max(ended_s for _, ended_s in times) - max(began_s for began_s, _ in times))
    return took_s


def _histograms(caller: Caller) -> Histograms:
    values = dict(line.rsplit(" ", 1) for line in caller.lines("/metrics") if not line.startswith("#"))
    names = ("post_prefill_seconds_count", "post_prefill_seconds_sum", "transfer_seconds_sum")
    return Histograms(*(float(values[f"kv_coordinator_{name}"]) for name in names))


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Take part in the handoffs that the driver names, one at a time."""
    while True:
        room, count, begin_s = driver.recv()
        pages = np.arange(count, dtype=np.int32)
        if isinstance(rank, DecodeRank):
            rank.offer(room, pages)
            driver.send("offered")
        time.sleep(max(0.0, begin_s - time.monotonic()))
        began_s = time.monotonic()
        if isinstance(rank, PrefillRank):
            rank.send(room, pages, last=True)
        driver.send((began_s, _outcome_s(rank, room)))


def _outcome_s(rank: PrefillRank | DecodeRank, room: int) -> float:
    """Wait for the outcome of a room; when it was there.

    Raises:
        RuntimeError: it is a failure.

    """
    while True:
        rank.wait(1.0)
        events: Sequence[Event] = rank.drain()
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, Outcome) and event.room == room:
                if event.failure is not None:
                    message = f"room {room} has failed: {event.failure}"
                    raise RuntimeError(message)
                return now_s
