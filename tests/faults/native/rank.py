"""A rank over a native engine, in a process of its own, that says and hears what the test tells it to.

It is run by ``scripts.benches.support.rank_process``, in a ``Deployment``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from coordinator.client import DecodeRank, Endpoint, Outcome, PrefillRank
from scripts.benches.support.waiting import barrier
from tests.backends.crooked import crooked

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

    from coordinator.client import KVPool
    from coordinator.messages import Event

_READY_S: Final = 30.0


class Say(NamedTuple):
    """Send or offer the first ``pages`` pages for each of these rooms; answered when that is heard.

    ``last`` is for what is sent.
    """

    rooms: list[int]
    pages: int
    last: bool


class Await(NamedTuple):
    """Wait for the outcomes of these rooms; answered with ``End`` for each."""

    rooms: list[int]


class Cancel(NamedTuple):
    """Give these rooms up; answered when that is heard."""

    rooms: list[int]


class Pose(NamedTuple):
    """Join as a decode rank of another group, and be that from now on; answered when it is ready.

    ``how`` says what is wrong with its endpoint; see ``tests.backends.crooked``.
    """

    control: str
    group: str
    backend: str
    options: dict[str, Any]
    how: str


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
        if isinstance(order, Pose):
            rank = _pose(order, pool)
            driver.send("posed")
        elif isinstance(order, Say | Cancel):
            _say(rank, order)
            _note(barrier(rank), ends)
            driver.send("said")
        else:
            while not ends.keys() >= set(order.rooms):
                rank.wait(1.0)
                _note(rank.drain(), ends)
            driver.send([ends[room] for room in order.rooms])


def _say(rank: PrefillRank | DecodeRank, order: Say | Cancel) -> None:
    for room in order.rooms:
        if isinstance(order, Cancel):
            rank.cancel(room, "the test wants it")
            continue
        pages = np.arange(order.pages, dtype=np.int32)
        if isinstance(rank, PrefillRank):
            rank.send(room, pages, last=order.last)
        else:
            rank.offer(room, pages)


def _pose(order: Pose, pool: KVPool) -> DecodeRank:
    """Join with an endpoint that is not what it should be."""
    endpoint = Endpoint(pool, order.backend, order.options)
    if order.how == "closed":
        endpoint.close()
    endpoint.address = crooked(endpoint.address, order.how, pool.size_bytes)
    rank = DecodeRank.connect(order.control, group=order.group, rank=0, world_size=1, endpoint=endpoint)
    rank.wait_ready(_READY_S)
    return rank


def _note(events: Iterable[Event], ends: dict[int, End]) -> None:
    for event in events:
        if isinstance(event, Outcome):
            failure = event.failure
            ends[event.room] = (
                End("succeeded", "") if failure is None else End(failure.reason.value, failure.message)
            )
