"""A rank over a native engine, in a process of its own, that says and hears what the test tells it to.

It is run by ``scripts.benches.support.rank_process``, in a ``Deployment``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coordinator.client import DecodeRank, Outcome, PrefillRank
from scripts.benches.support.waiting import barrier

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

    from coordinator.client import KVPool
    from coordinator.messages import Event


class Say(NamedTuple):
    """Send or offer the first ``pages`` pages for each of these rooms; answered when that is heard."""

    rooms: list[int]
    pages: int


class Await(NamedTuple):
    """Wait for the outcomes of these rooms; answered with ``End`` for each."""

    rooms: list[int]


class End(NamedTuple):
    """How a handoff ended for this rank; a success has the reason ``succeeded``."""

    reason: str
    message: str


def pool_engine(rank: PrefillRank | DecodeRank, pool: KVPool, driver: Connection) -> None:
    """Tell where our memory is; then do what the driver says until it hangs up."""
    driver.send(pool.path)
    ends: dict[int, End] = {}
    while True:
        order = driver.recv()
        if isinstance(order, Say):
            _say(rank, order)
            _note(barrier(rank), ends)
            driver.send("said")
        else:
            while not ends.keys() >= set(order.rooms):
                rank.wait(1.0)
                _note(rank.drain(), ends)
            driver.send([ends[room] for room in order.rooms])


def _say(rank: PrefillRank | DecodeRank, order: Say) -> None:
    pages = np.arange(order.pages, dtype=np.int32)
    for room in order.rooms:
        if isinstance(rank, PrefillRank):
            rank.send(room, pages, last=True)
        else:
            rank.offer(room, pages)


def _note(events: Iterable[Event], ends: dict[int, End]) -> None:
    for event in events:
        if isinstance(event, Outcome):
            failure = event.failure
            ends[event.room] = (
                End("succeeded", "") if failure is None else End(failure.reason.value, failure.message)
            )
