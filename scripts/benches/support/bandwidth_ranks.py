"""The two ranks of the bandwidth bench, in their own processes: pages through one engine or the other."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.client import DecodeRank, Layout, Outcome, PrefillRank
from scripts.benches.support import bare
from scripts.benches.support.waiting import barrier

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from coordinator.client import KVPool

#: Handoffs in flight.
WINDOW: Final = 4
LAYOUT: Final = Layout(layers=32, page_tokens=16, kv_heads=4, head_size=128, dtype="bfloat16")
#: Pages that make 1 MiB, over all planes.
MIB_PAGES: Final = (1 << 20) // (LAYOUT.planes * LAYOUT.page_bytes(1))
POOL_PAGES: Final = WINDOW * 256 * MIB_PAGES


class Engine(NamedTuple):
    """What is measured: a backend and its options."""

    table: str
    backend: str
    options: dict[str, object]


class Case(NamedTuple):
    """The handoffs of a table."""

    suffix: str
    mib: int
    scattered: bool


class Order(NamedTuple):
    """What a rank shall do: ``direct``, ``coordinator`` or ``alone``; its rooms count from ``first``."""

    what: str
    case: Case
    first: int
    handoffs: int


def pool_engine(rank: PrefillRank | DecodeRank, pool: KVPool, driver: Connection) -> None:
    """Do what the driver says."""
    address = pool.regions[0].address
    memory = geometry(address)
    words = np.ctypeslib.as_array((ctypes.c_uint64 * (pool.size_bytes // 8)).from_address(address))
    blocks = words.reshape(memory.count, memory.block_bytes // 8)
    if isinstance(rank, DecodeRank):
        blocks.fill(0)
        _decode(rank, memory, blocks, driver)
    else:
        blocks.fill(1)
        _prefill(rank, memory, driver)


def geometry(address: int) -> bare.Memory:
    """Each rank's pool, at this address."""
    return bare.Memory(address, LAYOUT.page_bytes(1), LAYOUT.planes, POOL_PAGES)


def slots_of(case: Case, seed: int) -> list[NDArray[np.int32]]:
    """The pages of each handoff in flight; with other seeds, in another order when scattered."""
    pages = case.mib * MIB_PAGES
    order = np.arange(POOL_PAGES, dtype=np.int32)
    if case.scattered:
        order = np.random.default_rng(seed).permutation(order)
    return [order[slot * pages : (slot + 1) * pages] for slot in range(WINDOW)]


def _decode(rank: DecodeRank, memory: bare.Memory, blocks: NDArray[np.uint64], driver: Connection) -> None:
    """Offer pages, and check that they come."""
    engine: Engine = driver.recv()
    receiver = bare.receiver(engine.backend, engine.options, memory)
    driver.send(receiver.address)
    try:
        while True:
            order: Order = driver.recv()
            slots = slots_of(order.case, seed=2)
            blocks[:, 0] = blocks[:, -1] = 0
            rooms = range(order.first, order.first + order.handoffs)
            if order.what == "coordinator":
                _offer_all(rank, rooms, slots, driver)
            else:
                if order.what == "alone":
                    # All at once, for one place: they come one by one.
                    for room in rooms:
                        rank.offer(room, slots[0])
                    barrier(rank)
                driver.send("begun")
            driver.recv()
            rank.drain()
            written = slots if order.what != "alone" else slots[:1]
            at = np.concatenate([memory.blocks(pages) for pages in written])
            driver.send(int(np.count_nonzero(blocks[at, 0] != 1) + np.count_nonzero(blocks[at, -1] != 1)))
    finally:
        receiver.close()


def _offer_all(rank: DecodeRank, rooms: range, slots: list[NDArray[np.int32]], driver: Connection) -> None:
    """Offer pages for all rooms, as they become free; tell when the first are offered."""
    free = list(slots)
    waiting = deque(rooms)
    held: dict[int, NDArray[np.int32]] = {}
    while waiting or held:
        while waiting and free:
            room = waiting.popleft()
            held[room] = free.pop()
            rank.offer(room, held[room])
            if room == rooms[WINDOW - 1]:
                driver.send("begun")
        rank.wait(1.0)
        # The release of an earlier order's room may come only now.
        free += [held.pop(room) for room in _released(rank) if room in held]


def _prefill(rank: PrefillRank, memory: bare.Memory, driver: Connection) -> None:
    """Send pages, in one way or the other."""
    engine, address = driver.recv()
    sender = bare.sender(engine.backend, engine.options, memory, address)
    driver.send("met")
    try:
        while True:
            order: Order = driver.recv()
            here, there = slots_of(order.case, seed=1), slots_of(order.case, seed=2)
            if order.what == "alone":
                driver.send(_alone(rank, sender, order, here[0], there[0]))
                continue
            began_s = time.monotonic()
            if order.what == "direct":
                _direct(sender, order.handoffs, here, there)
            else:
                _through(rank, order, here)
            driver.send(time.monotonic() - began_s)
    finally:
        sender.close()


def _direct(
    sender: bare.Sender, handoffs: int, here: list[NDArray[np.int32]], there: list[NDArray[np.int32]]
) -> None:
    """Write as many handoffs, ``WINDOW`` of them at a time."""
    free = list(range(WINDOW))
    begun = 0
    moving: list[tuple[int, object]] = []
    while begun < handoffs or moving:
        while free and begun < handoffs:
            slot = free.pop()
            begun += 1
            moving.append((slot, sender.post(here[slot], there[slot])))
        left = [(slot, transfer) for slot, transfer in moving if not sender.done(transfer)]
        if len(left) == len(moving):
            time.sleep(bare.POLL_S)
        free += [slot for slot, transfer in moving if (slot, transfer) not in left]
        moving = left


def _through(rank: PrefillRank, order: Order, here: list[NDArray[np.int32]]) -> None:
    """Hand over as many, ``WINDOW`` of them at a time."""
    free = list(here)
    waiting = deque(range(order.first, order.first + order.handoffs))
    held: dict[int, NDArray[np.int32]] = {}
    while waiting or held:
        while free and waiting:
            room = waiting.popleft()
            held[room] = free.pop()
            rank.send(room, held[room], last=True)
        rank.wait(1.0)
        free += [held.pop(room) for room in _released(rank) if room in held]


def _released(rank: PrefillRank | DecodeRank) -> list[int]:
    """Rooms whose pages are free, of the events that have come; all outcomes must be successes."""
    rooms = []
    for event in rank.drain():
        if isinstance(event, Outcome):
            _check(event)
        else:
            rooms.append(event.room)
    return rooms


def _alone(
    rank: PrefillRank,
    sender: bare.Sender,
    order: Order,
    here: NDArray[np.int32],
    there: NDArray[np.int32],
) -> list[tuple[float, float]]:
    """Seconds of a bare transfer and of the handoff of the same pages after it, again and again."""
    pairs = []
    for room in range(order.first, order.first + order.handoffs):
        began_s = time.monotonic()
        transfer = sender.post(here, there)
        while not sender.done(transfer):
            time.sleep(bare.POLL_S)
        between_s = time.monotonic()
        rank.send(room, here, last=True)
        outcome = None
        while outcome is None:
            rank.wait(1.0)
            outcome = next((event for event in rank.drain() if isinstance(event, Outcome)), None)
        pairs.append((between_s - began_s, time.monotonic() - between_s))
        _check(outcome)
    return pairs


def _check(outcome: Outcome) -> None:
    """Raise RuntimeError unless it has succeeded."""
    if outcome.failure is not None:
        message = f"room {outcome.room} has failed: {outcome.failure}"
        raise RuntimeError(message)
