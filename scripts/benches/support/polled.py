"""The pattern in use today: each step asks every sender, and all ranks agree on the least advanced state.

Written from its description; where SGLang can be imported, its own function does the asking and agreeing.
The states are those of its senders, in their order: so the least of them is the one that all can act on.
"""

from __future__ import annotations

import threading
import time
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


class State(IntEnum):
    """How far a transfer is."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCEEDED = 4


class Transfers:
    """One rank's transfers, whose states its own thread changes, as a transfer engine's would.

    Attributes:
        states: by room.
        ended_s: when each room's transfer has ended here, on the monotonic clock.

    """

    def __init__(self) -> None:
        """Start without any."""
        self.states: dict[int, State] = {}
        self.ended_s: dict[int, float] = {}

    def begin(self, room: int) -> Sender:
        """Start one that ends only when ``end`` says so."""
        self.states[room] = State.TRANSFERRING
        return Sender(self.states, room)

    def end(self, rooms: Sequence[int], begin_s: float, pace_s: float) -> threading.Thread:
        """End these, one by one, the first at ``begin_s``; returns at once."""
        thread = threading.Thread(target=self._end, args=(rooms, begin_s, pace_s))
        thread.start()
        return thread

    def _end(self, rooms: Sequence[int], begin_s: float, pace_s: float) -> None:
        for number, room in enumerate(rooms):
            time.sleep(max(0.0, begin_s + number * pace_s - time.monotonic()))
            self.states[room] = State.SUCCEEDED
            self.ended_s[room] = time.monotonic()


class Sender:
    """What a scheduler asks about one room."""

    def __init__(self, states: dict[int, State], room: int) -> None:
        """Look into ``states``."""
        self._states = states
        self.room = room

    def poll(self) -> State:
        """Say how far it is here."""
        return self._states[self.room]


class Agree(Protocol):
    """How all ranks come to the same states."""

    def __call__(self, senders: Sequence[Sender]) -> Sequence[int]:
        """Return the state that every rank has reached at least, for each sender, in their order."""


def by_all_reduce(senders: Sequence[Sender]) -> Sequence[int]:
    """Ask every sender, and take the least state over all ranks of the world."""
    states = torch.tensor([int(sender.poll()) for sender in senders], dtype=torch.int32, device="cpu")
    dist.all_reduce(states, op=dist.ReduceOp.MIN)
    agreed: list[int] = states.tolist()
    return agreed


def has_sglang() -> bool:
    """Whether SGLang can be imported here."""
    return find_spec("sglang") is not None


def by_sglang() -> Agree:
    """Let SGLang's own function do the same; this rank is alone in its context-parallel group."""
    function: Any = import_module("sglang.srt.disaggregation.utils").poll_and_all_reduce_attn_cp_tp_group
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    world = dist.group.WORLD

    def agree(senders: Sequence[Sender]) -> Sequence[int]:
        states: Sequence[int] = function(senders, alone, world)
        return states

    return agree
