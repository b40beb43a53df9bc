"""The rank of an engine in the polling bench: one scheduler loop, and two ways to learn what has ended.

A step is: the engine's own broadcast from rank 0; retiring what has ended; a forward pass, here a sleep.
What retiring costs is timed, in the same loop, for either way:

- *polling* asks every sender and agrees with the other ranks by an all-reduce (``polled``);
- *head* drains through rank 0's head token, which the broadcast has brought along. Reading it, on rank 0, is
  part of the cost; the broadcast, which both ways have and which carries the token, is not.

Nothing but the broadcast ties the ranks to one another with *head*, and a real engine's forward pass is
not here: so that none runs away, all meet in a barrier every ``BARRIER_STEPS``, in both ways and untimed.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from coordinator.client import Outcome
from scripts.benches.support import polled
from scripts.benches.support.scheduler_orders import Retired
from scripts.benches.support.waiting import barrier, complete

if TYPE_CHECKING:
    from coordinator.client import PrefillRank
    from coordinator.messages import Event
    from scripts.benches.support.scheduler_orders import Begin, Retire, Steps, Way, World

#: How late the last rank is when it is.
LATE_S: Final = 0.02
BARRIER_STEPS: Final = 64
#: What the engine broadcasts in each step; the token is at its beginning.
_CARRIER_BYTES: Final = 64
_TOKEN_BYTES: Final = 17
#: A room's outcome that does not come for so many seconds never will.
_PATIENCE_S: Final = 60.0


class Scheduler:
    """A prefill rank's loop."""

    def __init__(self, rank: PrefillRank, world: World) -> None:
        """Meet the other ranks."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{world.meeting}", rank=world.rank, world_size=world.size
        )
        self._rank = rank
        self._is_first = world.rank == 0
        self._is_last = world.rank == world.size - 1
        self._agree: polled.Agree = polled.by_sglang() if world.sglang else polled.by_all_reduce
        self._transfers = polled.Transfers()
        self._queue: list[polled.Sender] = []
        self._carried = torch.zeros(_CARRIER_BYTES, dtype=torch.uint8)
        self._carrier = memoryview(self._carried.numpy())  # type: ignore[arg-type] # an array of bytes is a buffer
        # The first collective opens the connections.
        dist.barrier()

    def begin(self, order: Begin) -> None:
        """Take rooms on, for both ways."""
        rooms = range(order.first, order.last + 1)
        self._queue += [self._transfers.begin(room) for room in rooms]
        complete(self._rank, rooms)

    def steps(self, order: Steps) -> list[float]:
        """Make steps; what retiring cost in each."""
        costs = []
        for number in range(order.number):
            is_late = self._is_last and order.late_every and number % order.late_every == 0
            cost_s, _ = self._step(order.way, number, LATE_S if is_late else 0.0)
            costs.append(cost_s)
            time.sleep(order.forward_s)
        dist.barrier()
        return costs

    def expect(self, order: Retire) -> None:
        """Take on rooms that will end: they are in flight when this returns."""
        if order.way == "polling":
            self._queue += [self._transfers.begin(room) for room in order.rooms]
            return
        for room in order.rooms:
            self._rank.send(room, [room], last=True)
        barrier(self._rank)

    def retire(self, order: Retire, begin_s: float) -> Retired:
        """Make steps until all of these rooms are retired; the first one ends at ``begin_s``.

        Raises:
            TimeoutError: one has not succeeded for long.

        """
        thread = None
        if order.way == "polling":
            thread = self._transfers.end(order.rooms, begin_s, order.pace_s)
        until_s = begin_s + len(order.rooms) * order.pace_s + _PATIENCE_S
        retired: dict[int, tuple[float, int]] = {}
        number = 0
        while len(retired) < len(order.rooms):
            _, ended = self._step(order.way, number, 0.0)
            now_s = time.monotonic()
            retired |= {room: (now_s, number) for room in ended if room in order.rooms}
            if now_s > until_s:
                message = f"{len(order.rooms) - len(retired)} rooms have not succeeded"
                raise TimeoutError(message)
            number += 1
            time.sleep(order.forward_s)
        if thread is not None:
            thread.join()
        dist.barrier()
        moments_s, steps = zip(*(retired[room] for room in order.rooms), strict=True)
        ended_s = [self._transfers.ended_s.get(room, 0.0) for room in order.rooms]
        return Retired(list(moments_s), list(steps), ended_s)

    def _step(self, way: Way, number: int, late_s: float) -> tuple[float, list[int]]:
        """Make one step without its forward pass; what retiring cost, and the rooms that were."""
        # What the engine has to say; after a forward pass it also wakes the processor up, for both ways.
        self._carrier[:] = bytes(_CARRIER_BYTES)
        cost_s = self._put_token() if way == "head" and self._is_first else 0.0
        dist.broadcast(self._carried, 0)
        if number % BARRIER_STEPS == 0:
            dist.barrier()
        token = bytes(self._carrier[:_TOKEN_BYTES])
        if late_s:
            time.sleep(late_s)
        began_s = time.perf_counter()
        if way == "head":
            events = self._rank.drain(through=token)
            ended = [event.room for event in events if _is_success(event)] if events else []
        else:
            ended = self._poll()
        return cost_s + time.perf_counter() - began_s, ended

    def _put_token(self) -> float:
        """Give rank 0's token to the broadcast; what reading it cost."""
        began_s = time.perf_counter()
        token = self._rank.head
        cost_s = time.perf_counter() - began_s
        self._carrier[:_TOKEN_BYTES] = token
        return cost_s

    def _poll(self) -> list[int]:
        """Ask all senders, agree, and keep those in the queue that have not ended."""
        undone, ended = [], []
        for sender, state in zip(self._queue, self._agree(self._queue), strict=True):
            if state in (polled.State.SUCCEEDED, polled.State.FAILED):
                ended.append(sender.room)
            else:
                undone.append(sender)
        self._queue = undone
        return ended


def _is_success(event: Event) -> bool:
    return isinstance(event, Outcome) and event.failure is None
