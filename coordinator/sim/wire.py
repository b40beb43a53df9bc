"""What the driver and the simulated ranks tell one another.

From the driver to rank 0: ``Command``, work for the whole group.
From rank 0 to the others: ``Step``, what every rank of the group does next, the same on each.
From a rank to the driver: ``Reports``, what happened, and digests to compare.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from coordinator.sim.errors import SimulationError


class Request(Struct, frozen=True, array_like=True):
    """One room's prompt, as the router gives it to a prefill and to a decode group.

    Attributes:
        room: the room, 1 or more.
        generation: how often this room was used before; its pages differ each time.
        pages: length of the prompt.
        chunk_pages: pages that prefill computes, and sends, in one piece.
        chunk_steps: how many steps a chunk takes.
        prefix_pages: of ``pages``, how many decode has in its cache already.
        answer_steps: steps for which decode generates after a success, and holds the pages.

    """

    room: int
    pages: int
    chunk_pages: int
    chunk_steps: int = 1
    generation: int = 0
    prefix_pages: int = 0
    answer_steps: int = 0


# --- driver -> rank 0 ------------------------------------------------------------------------


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """Queue these requests, in order."""

    requests: list[Request]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Give these rooms up, as far as they have no outcome yet."""

    rooms: list[int]
    why: str


class Finish(Struct, frozen=True, array_like=True, tag="finish"):
    """Make a last step, report the final state and end."""


Command = Submit | Cancel | Finish


# --- rank 0 -> the others --------------------------------------------------------------------


class Step(Struct, frozen=True, array_like=True):
    """One scheduler step. Every rank of the group applies exactly this.

    Attributes:
        number: 1, 2, 3 ...
        head: rank 0's head token: up to where all ranks drain.
        requests: newly queued.
        cancels: rooms to give up, each with why.
        last: nothing follows.

    """

    number: int
    head: bytes
    requests: list[Request] = []
    cancels: list[tuple[int, str]] = []
    last: bool = False


# --- rank -> driver --------------------------------------------------------------------------


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The rank is registered, and so are all others of its group."""

    pid: int
    pool_path: str
    pool_bytes: int
    seconds: float


class Started(Struct, frozen=True, array_like=True, tag="started"):
    """Decode has offered the room, or prefill has sent its first chunk."""

    room: int
    generation: int


class Completed(Struct, frozen=True, array_like=True, tag="completed"):
    """Prefill is complete here."""

    room: int
    generation: int


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """The outcome of a room was applied here.

    Attributes:
        room: the room.
        generation: which use of it.
        attempt: the coordinator's number of the handoff.
        reason: empty when it succeeded.
        message: the failure's sentence, with its origin.
        corrupt_pages: pages of this decode rank that do not hold what they must after a success.
        seconds: from prefill-complete here to the outcome, at prefill; -1 when there is no such time.

    """

    room: int
    generation: int
    attempt: int
    reason: str
    message: str = ""
    corrupt_pages: int = 0
    seconds: float = -1.0


class Freed(Struct, frozen=True, array_like=True, tag="freed"):
    """The room's pages were released here, an answer that needs them is complete, and they are free again."""

    room: int
    generation: int


class Refusal(Struct, frozen=True, array_like=True, tag="refusal"):
    """The coordinator did not accept something that this rank said."""

    room: int
    message: str


class Checkpoint(Struct, frozen=True, array_like=True, tag="checkpoint"):
    """Everything that this rank applied up to a step, and its allocator's state, as a digest."""

    step: int
    digest: bytes


class LastState(Struct, frozen=True, array_like=True, tag="final"):
    """What is left after the last step.

    ``held`` are rooms that still hold pages or have no outcome; ``strays`` counts events about
    rooms that this rank never had.
    """

    free_pages: int
    held: list[int]
    strays: int


Report = Ready | Started | Completed | Ended | Freed | Refusal | Checkpoint | LastState


class Reports(Struct, frozen=True, array_like=True):
    """Reports of one rank, in order. ``incarnation`` counts the starts of its group."""

    group: str
    rank: int
    incarnation: int
    items: list[Report]


_T = TypeVar("_T")

encode: Final = msgspec.msgpack.encode
_command: Final = msgspec.msgpack.Decoder(Command)
_step: Final = msgspec.msgpack.Decoder(Step)
_reports: Final = msgspec.msgpack.Decoder(Reports)


def decode_command(frame: bytes) -> Command:
    """Decode what the driver sent."""
    return _decode(_command, frame)


def decode_step(frame: bytes) -> Step:
    """Decode what rank 0 sent."""
    return _decode(_step, frame)


def decode_reports(frame: bytes) -> Reports:
    """Decode what a rank sent to the driver."""
    return _decode(_reports, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        message = f"malformed message between simulated processes: {error}"
        raise SimulationError(message) from error
