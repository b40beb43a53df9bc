"""Planning 512K tokens of Llama 3.3 70B, and how long the coordinator's loop stands still for them.

``merged_ms`` and ``scattered_ms`` are for one rank of an engine of TP 1, which has the most to plan; the
tables ``tp2`` to ``tp8`` are the same for larger ones. Pages follow one another on both sides, or on
neither. ``loop_stall_ms`` is with the model's pages of 16 tokens, ``loop_stall_page1_ms`` with as many
tokens in pages of one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.descriptors import merged_runs
from coordinator import presets
from coordinator.client import DecodeRank, Endpoint, KVPool, Outcome, PrefillRank
from coordinator.config import Config
from coordinator.errors import NotReadyError
from coordinator.layout import Layout
from coordinator.service import Service
from coordinator.worker.places import RankPool
from coordinator.worker.plan import route
from coordinator.worker.settings import Budget
from scripts.benches import at_most

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from scripts.benches import Arguments, Metrics, Target

    Pages = NDArray[np.int32]

TARGETS: Final[dict[str, Target]] = {
    "scattered_ms": at_most(250),
    "merged_ms": at_most(25),
    "loop_stall_ms": at_most(50),
    "loop_stall_page1_ms": at_most(50),
}

TOKENS: Final = 512 * 1024
#: Ranks of each engine beside that of one.
TPS: Final = (2, 4, 8)
_TICK_S: Final = 0.001
_PATIENCE_S: Final = 120.0


async def run(arguments: Arguments) -> Metrics:
    """Measure; each figure is the best of a few, for others use the same cores.

    Raises:
        NotReadyError: a worker or a rank did not start, or a handoff did not succeed.

    """
    times = 2 if arguments.quick else 5
    layout = presets.load("Llama-3.3-70B")
    count = TOKENS // layout.page_tokens
    scattered = np.random.default_rng(0).permutation(count).astype(np.int32)
    contiguous = np.arange(count, dtype=np.int32)

    def planned(tp: int) -> dict[str, float]:
        return {
            "scattered_ms": min(_plan_ms(layout, tp, scattered) for _ in range(times)),
            "merged_ms": min(_plan_ms(layout, tp, contiguous) for _ in range(times)),
        }

    single = np.random.default_rng(0).permutation(TOKENS).astype(np.int32)
    return {
        "pages": float(count),
        **planned(1),
        **{f"tp{tp}": planned(tp) for tp in TPS},
        "loop_stall_ms": await _stall_ms(80, 16, scattered, times),
        "loop_stall_page1_ms": await _stall_ms(4, 1, single, times),
    }


def _plan_ms(layout: Layout, tp: int, pages: Pages) -> float:
    """Time on one core from packed page lists to the contiguous copies of all posts of one rank's move."""
    pool = RankPool(layout, tp, 0, pages.size)
    packed = pages.astype("<i4").tobytes()
    began_s = time.thread_time()
    runs = 0
    for post in route(pool, pool).posts(packed, packed, Budget()):
        for part in post:
            runs += merged_runs(part).size_bytes.size
    seconds = time.thread_time() - began_s
    assert runs, "something was planned"  # noqa: S101 - a bench that plans nothing measures nothing
    return 1e3 * seconds


async def _stall_ms(layers: int, page_tokens: int, pages: Pages, times: int) -> float:
    """The longest that a coordinator's loop stands still while such a handoff goes through it.

    Its pages are as many, but small. Workers and ranks are in processes of their own, as always: what they
    do with the pages must not hold the coordinator's interpreter.
    """
    layout = Layout(layers, page_tokens, kv_heads=2, head_size=1, dtype="uint8")
    spawning = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="kvc-") as directory:
        service = Service(_config(Path(directory)))
        await service.start()
        line, other = spawning.Pipe()
        ranks = spawning.Process(target=_ranks, args=(directory, layout, pages, other), daemon=True)
        ranks.start()
        try:
            await asyncio.to_thread(_told, line, "ready")
            # The first one starts workers and links.
            stalls_ms = [await _hand_over(line, room) for room in range(1, times + 2)]
        finally:
            line.send(0)
            await asyncio.to_thread(ranks.join, _PATIENCE_S)
            await service.stop()
    return min(stalls_ms[1:])


def _config(directory: Path) -> Config:
    return Config.model_validate(
        {
            "listen": {
                "control": [f"ipc://{directory}/control"],
                "outcomes": [f"ipc://{directory}/outcomes"],
            },
            "log": {"level": "error"},
        }
    )


async def _hand_over(line: Connection, room: int) -> float:
    """Hand a room over; the longest time by which a tick of the loop was late meanwhile, in milliseconds."""
    line.send(room)
    handing = asyncio.create_task(asyncio.to_thread(_told, line, "over"))
    worst_s = 0.0
    while not handing.done():
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        worst_s = max(worst_s, time.monotonic() - due_s)
    await handing
    return 1e3 * worst_s


def _told(line: Connection, what: str) -> None:
    """Wait until the ranks' process says this.

    Raises:
        NotReadyError: it says something else, or nothing.

    """
    heard = line.recv() if line.poll(_PATIENCE_S) else "nothing"
    if heard != what:
        message = f"the ranks were to say {what!r}, they said {heard}"
        raise NotReadyError(message)


def _ranks(directory: str, layout: Layout, pages: Pages, line: Connection) -> None:
    """Be two engines of two ranks; hand over each room that is named on ``line``, until it is 0."""
    address, world_size = f"ipc://{directory}/control", 2
    with ExitStack() as cleanup:
        ranks: list[PrefillRank | DecodeRank] = []
        for number in range(world_size):
            pools = [cleanup.enter_context(KVPool.allocate(layout, pages.size, world_size)) for _ in range(2)]
            endpoint = cleanup.enter_context(Endpoint(pools[1], "loopback"))
            ranks.append(
                cleanup.enter_context(
                    PrefillRank.connect(
                        address, group="prefill", rank=number, world_size=world_size, pool=pools[0]
                    )
                )
            )
            ranks.append(
                cleanup.enter_context(
                    DecodeRank.connect(
                        address, group="decode", rank=number, world_size=world_size, endpoint=endpoint
                    )
                )
            )
        for rank in ranks:
            rank.wait_ready(_PATIENCE_S)
        line.send("ready")
        while room := line.recv():
            _all_say(ranks, room, pages)
            line.send("over")


def _all_say(ranks: Sequence[PrefillRank | DecodeRank], room: int, pages: Pages) -> None:
    """Offer and send on all ranks, and wait for the outcome on each."""
    for rank in ranks:
        if isinstance(rank, PrefillRank):
            rank.send(room, pages, last=True)
        else:
            rank.offer(room, pages)
    for rank in ranks:
        _await_outcome(rank, room)


def _await_outcome(rank: PrefillRank | DecodeRank, room: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        rank.wait(1.0)
        for event in rank.drain():
            if isinstance(event, Outcome) and event.room == room:
                if event.failure is None:
                    return
                message = f"room {room} has failed: {event.failure}"
                raise NotReadyError(message)
    message = f"room {room} has no outcome after {_PATIENCE_S:g} s"
    raise NotReadyError(message)
