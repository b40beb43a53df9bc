"""Machines in every state, and what tests ask of them.

The usual machine here belongs to two groups of two ranks; rank p writes to rank p. Its pages:

    rank   prefill     decode      prefix
    0      10, 11      20, 21      0
    1      12, 13      22, 23      0
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from coordinator.events import (
    Aborted,
    Moved,
    MoveFailed,
    Offered,
    Paired,
    Pairing,
    Sent,
)
from coordinator.machine import HandoffMachine
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.events import Effect, Event

ROOM = 7
ATTEMPT = 3
AUX = b"first token"
BROKEN = Failure(Reason.TRANSPORT, "decode-0/0", "the link to decode-0/0 broke")
CANCELLED = Failure(Reason.CANCELLED_BY_DECODE, "decode-0/1", "the client went away")
PAIRS = Pairing.of(2, 2, ((0, 0), (1, 1)))


def packed(*pages: int) -> bytes:
    """Page numbers as they travel: little-endian int32."""
    return struct.pack(f"<{len(pages)}i", *pages)


def unpacked(pages: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(pages) // 4}i", pages)


def feed(machine: HandoffMachine, *events: Event) -> list[Effect]:
    """Apply events and check the invariants after each of them; returns all the effects."""
    effects: list[Effect] = []
    for event in events:
        effects += machine.apply(event)
        machine.validate()
    return effects


def machine_after(*events: Event) -> HandoffMachine:
    machine = HandoffMachine(ROOM, ATTEMPT)
    feed(machine, *events)
    return machine


def picture(machine: HandoffMachine) -> dict[str, str]:
    """Everything that a machine remembers, in a form that can be compared later."""
    legs = machine._legs
    seen = {name: repr(getattr(machine, name)) for name in machine.__slots__ if name != "_legs"}
    return seen | {f"legs.{name}": repr(getattr(legs, name)) for name in legs.__slots__}


# The story of a handoff, each state one step further than the one before

_OPEN_UNPAIRED: Sequence[Event] = (
    Sent(0, packed(10), last=False),
    Offered(0, packed(20, 21), 0),
)
_OPEN: Sequence[Event] = (*_OPEN_UNPAIRED, Paired(PAIRS))
_WAITING_UNPAIRED: Sequence[Event] = (*_OPEN_UNPAIRED, Sent(0, packed(11), last=True, aux=AUX))
_WAITING: Sequence[Event] = (*_OPEN, Sent(0, packed(11), last=True, aux=AUX))
_MOVING: Sequence[Event] = (
    *_WAITING,
    Offered(1, packed(22, 23), 0),
    Sent(1, packed(12, 13), last=True),
)


def open_unpaired() -> HandoffMachine:
    """Both groups have spoken, but the machine was not told that they belong together."""
    return machine_after(*_OPEN_UNPAIRED)


def open_() -> HandoffMachine:
    """Move 0 (page 10 to 20) is in flight; rank 0 may send more; of the ranks 1 nothing is known."""
    return machine_after(*_OPEN)


def waiting_unpaired() -> HandoffMachine:
    """Prefill rank 0 is complete; the machine was not told of the second group."""
    return machine_after(*_WAITING_UNPAIRED)


def waiting() -> HandoffMachine:
    """Moves 0 and 1 are in flight; rank 0 is complete; the ranks 1 are missing."""
    return machine_after(*_WAITING)


def moving() -> HandoffMachine:
    """Moves 0, 1 (leg 0 -> 0) and 2 (leg 1 -> 1) are in flight; all ranks are in."""
    return machine_after(*_MOVING)


def succeeded() -> HandoffMachine:
    return machine_after(*_MOVING, Moved(0), Moved(1), Moved(2))


def failed() -> HandoffMachine:
    """Move 0 has failed; nothing of the moves 0, 1 and 2 is known to be quiet."""
    return machine_after(*_MOVING, MoveFailed(0, BROKEN, source_quiet=False, destination_quiet=False))


def failed_quiet() -> HandoffMachine:
    """Cancelled before anything moved; both sides are released."""
    return machine_after(*_OPEN_UNPAIRED, Aborted(CANCELLED))
