"""What the state machine of a handoff hears (events) and what it asks for (effects)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from coordinator.messages import Role
from coordinator.reasons import Failure

#: Number of the move that stands for all moves of a former coordinator.
INHERITED: Final = -1
#: In a leg, in the place of a decode rank: the prefill engine itself moves the pages, to whom is its affair.
OWN: Final = -1


class State(StrEnum):
    """Where a handoff stands."""

    OPEN = "open"
    WAITING = "waiting"
    MOVING = "moving"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    #: Whether the verdict is known. Set once for each state: it is asked several times for each event.
    terminal: bool

    def __init__(self, value: str) -> None:
        """Note whether this state is an end."""
        self.terminal = value in {"succeeded", "failed"}


Leg = tuple[int, int]


class Pairing(msgspec.Struct, frozen=True):
    """Which ranks exchange pages; shared by all handoffs between the same two groups.

    ``by_source[p]`` and ``by_destination[d]`` list the legs of that rank. With ``own`` there are none,
    and no decode ranks: the prefill engine moves the pages by itself, and each of its ranks tells what
    became of its move, which has the rank's number.
    """

    prefill_world: int
    decode_world: int
    by_source: tuple[tuple[Leg, ...], ...]
    by_destination: tuple[tuple[Leg, ...], ...]
    own: bool = False

    @classmethod
    def of_own(cls, prefill_world: int) -> Pairing:
        """Describe a prefill engine that moves the pages by itself."""
        return cls(prefill_world, 0, ((),) * prefill_world, (), own=True)

    @classmethod
    def of(cls, prefill_world: int, decode_world: int, legs: tuple[Leg, ...]) -> Pairing:
        """Index the legs from both ends."""
        by_source: list[list[Leg]] = [[] for _ in range(prefill_world)]
        by_destination: list[list[Leg]] = [[] for _ in range(decode_world)]
        for leg in legs:
            by_source[leg[0]].append(leg)
            by_destination[leg[1]].append(leg)
        return cls(
            prefill_world, decode_world, tuple(map(tuple, by_source)), tuple(map(tuple, by_destination))
        )


# --- events ----------------------------------------------------------------------------------
# msgspec structs, not dataclasses: building a frozen dataclass costs 6 times as much, on a path
# that is taken some 30 times per TP-8 handoff.


class Opened(msgspec.Struct, frozen=True):
    """A prefill rank has queued the room."""

    rank: int


class Sent(msgspec.Struct, frozen=True):
    """A prefill rank's next pages (packed int32); ``last`` means that its prefill is complete."""

    rank: int
    pages: bytes
    last: bool
    aux: bytes = b""


class Offered(msgspec.Struct, frozen=True):
    """A decode rank's pages, which start behind the ``prefix_pages`` that it already has."""

    rank: int
    pages: bytes
    prefix_pages: int


class Extended(msgspec.Struct, frozen=True):
    """A decode rank still has the room in its queue."""

    rank: int


class Paired(msgspec.Struct, frozen=True):
    """Both groups are known."""

    pairing: Pairing


class Inherited(msgspec.Struct, frozen=True):
    """A former coordinator had this handoff: its moves may still be under way at both ends."""


class Moved(msgspec.Struct, frozen=True):
    """All bytes of a move are in place, and both ends of it are quiet."""

    move: int


class MoveFailed(msgspec.Struct, frozen=True):
    """A move has failed; its pages may or may not be quiet already."""

    move: int
    failure: Failure
    source_quiet: bool
    destination_quiet: bool


class MoveQuiet(msgspec.Struct, frozen=True):
    """One side's pages of a failed or given-up move are quiet now."""

    move: int
    side: Role


class Aborted(msgspec.Struct, frozen=True):
    """Somebody else decided that the handoff has failed: a clock, a lost rank, a cancel."""

    failure: Failure


Event = Opened | Sent | Offered | Extended | Paired | Inherited | Moved | MoveFailed | MoveQuiet | Aborted


# --- effects ---------------------------------------------------------------------------------


class StartClock(msgspec.Struct, frozen=True):
    """Prefill is complete on its first rank: the bound on everything that is missing starts."""


class ExtendClock(msgspec.Struct, frozen=True):
    """Decode asked for more time."""


class StartMove(msgspec.Struct, frozen=True):
    """Write ``source_pages`` of a prefill rank onto ``destination_pages`` of a decode rank."""

    move: int
    leg: Leg
    source_pages: bytes
    destination_pages: bytes


class AllMoving(msgspec.Struct, frozen=True):
    """Every rank of both groups is in; only bytes are missing."""


class Revoke(msgspec.Struct, frozen=True):
    """The verdict is in: what is not yet posted of these moves need not be."""

    moves: tuple[int, ...]


class Conclude(msgspec.Struct, frozen=True):
    """The verdict; ``failure`` is None for success. Exactly one per handoff."""

    failure: Failure | None


class Release(msgspec.Struct, frozen=True):
    """The pages of one side are quiet. Exactly one per side, never before ``Conclude``."""

    side: Role


class Late(msgspec.Struct, frozen=True):
    """The event came after the verdict and changed nothing in it."""

    event: Event


class Refuse(msgspec.Struct, frozen=True):
    """The sender broke the protocol with this event; the handoff is as it was."""

    message: str


Effect = StartClock | ExtendClock | StartMove | AllMoving | Revoke | Conclude | Release | Late | Refuse
