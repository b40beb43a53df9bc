"""One request whose prefill is complete on this rank, and the parts of SGLang that it is about."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from coordinator.reasons import Failure

Target = tuple[str, int]


class Poll(IntEnum):
    """The states of a sender; the numbers are SGLang's (``KVPoll``), and ``plugin`` checks them."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Manager(Protocol):
    """What is used of SGLang's ``CommonKVManager``."""

    request_status: Mapping[int, int]
    failure_records: Mapping[int, str]
    defer_decode_allocation: bool
    _staging_outstanding: Mapping[int, int]
    _deferred_ack_poisoned_rooms: AbstractSet[int]

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Note why a room has failed."""

    def update_status(self, bootstrap_room: int, status: int) -> None:
        """Bring a room's state forward."""

    def _room_notify_targets(self, bootstrap_room: int) -> list[Target]:
        """Whom to tell what becomes of a room."""

    def send_kv_status_message(
        self, *, targets: list[Target], bootstrap_room: int, status: int, failure_reason: str | None
    ) -> None:
        """Tell decode; may block for long."""


class Sender(Protocol):
    """What is used of SGLang's ``CommonKVSender``."""

    bootstrap_room: int
    kv_mgr: Manager

    def poll(self) -> int:
        """Return its own state."""


class Watched:
    """A request in flight.

    Attributes:
        room: its bootstrap room, which is also the coordinator's room.
        sender: SGLang's sender on this rank.
        targets: whom to tell of a failure; SGLang forgets them when its transfer ends.
        told: the coordinator knows of it, and decides. Else SGLang's own poll does.
        handed_back: the coordinator could not decide; it is told again when it is back.
        ended: how this rank's own transfer has ended, if it has.
        error: why it has failed.
        failure, attempt: the verdict of the coordinator, when that is a failure.
        decided: there is a verdict.
        released: the pages may be given back on all ranks.
        quiet_told: the coordinator knows that this rank reads the pages no more.

    """

    __slots__ = (
        "attempt",
        "decided",
        "ended",
        "error",
        "failure",
        "handed_back",
        "quiet_told",
        "released",
        "room",
        "sender",
        "targets",
        "told",
    )

    def __init__(self, room: int, sender: Sender, targets: list[Target]) -> None:
        """Nobody knows of it yet."""
        self.room = room
        self.sender = sender
        self.targets = targets
        self.told = False
        self.handed_back = False
        self.ended: Poll | None = None
        self.error = ""
        self.decided = False
        self.failure: Failure | None = None
        self.attempt = 0
        self.released = False
        self.quiet_told = False

    @property
    def answer(self) -> Poll:
        """What the scheduler is to see."""
        if self.decided and self.failure is None:
            return Poll.SUCCESS
        return Poll.FAILED if self.released else Poll.TRANSFERRING


def drained(manager: Manager, room: int) -> bool:
    """Whether SGLang's workers have done with a room whose state is terminal: they read its pages no more."""
    outstanding = manager._staging_outstanding  # noqa: SLF001 - the only place where SGLang tells
    if room in manager._deferred_ack_poisoned_rooms:  # noqa: SLF001 - as above
        return False  # SGLang itself cannot know any more.
    if manager.defer_decode_allocation and room in outstanding:
        return False
    return outstanding.get(room, 0) <= 0
