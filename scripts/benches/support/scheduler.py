"""The ranks of the polling bench, as the driver speaks to them; ``scheduler_loop`` is what is measured.

That module loads torch, which takes seconds; decode ranks do without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coordinator.client import DecodeRank, Outcome, PrefillRank
from scripts.benches.support.deployment import sleep_until
from scripts.benches.support.scheduler_orders import Begin, Order, Retire, Steps

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def engine(rank: PrefillRank | DecodeRank, driver: Connection) -> None:
    """Do what the driver says until it hangs up."""
    if isinstance(rank, DecodeRank):
        _decode(rank, driver)
    else:
        _schedule(rank, driver)


def _schedule(rank: PrefillRank, driver: Connection) -> None:
    loop: Any = import_module("scripts.benches.support.scheduler_loop")
    scheduler = loop.Scheduler(rank, driver.recv())
    driver.send("met")
    while True:
        order: Order = driver.recv()
        match order:
            case Begin():
                scheduler.begin(order)
                driver.send("begun")
            case Steps():
                driver.send(scheduler.steps(order))
            case Retire():
                scheduler.expect(order)
                driver.send("waiting")
                driver.send(scheduler.retire(order, driver.recv()))


def _decode(rank: DecodeRank, driver: Connection) -> None:
    """Offer each room's page when the room shall end; room n has page n."""
    while True:
        order: Retire = driver.recv()
        driver.send("waiting")
        begin_s = driver.recv()
        for number, room in enumerate(order.rooms):
            sleep_until(begin_s + number * order.pace_s)
            rank.offer(room, [room])
        open_rooms = set(order.rooms)
        while open_rooms:
            rank.wait(1.0)
            open_rooms -= {event.room for event in rank.drain() if isinstance(event, Outcome)}
        driver.send("over")
