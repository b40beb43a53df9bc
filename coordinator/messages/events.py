"""What a group is told of its handoffs: verdicts, and pages that are quiet."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from coordinator.messages.bounds import U64, Aux, Count, Room
from coordinator.reasons import Failure


class Role(StrEnum):
    """Which side of a handoff a group is on."""

    PREFILL = "prefill"
    DECODE = "decode"


class Elsewhere(Struct, frozen=True, array_like=True):
    """Where the other side's group has the same verdict: as event ``number`` of ``lineage``."""

    lineage: U64
    number: Count


class Outcome(Struct, frozen=True, array_like=True, tag="outcome", eq=False):
    """The one verdict of a handoff.

    Attributes:
        failure: None when it succeeded.
        aux: to decode, with a success: the side data that prefill's rank 0 has sent along.
        elsewhere: None while the other side is not known. It is no part of what the verdict says:
            two are equal without it.

    """

    room: Room
    attempt: Count
    failure: Failure | None = None
    aux: Aux = b""
    elsewhere: Elsewhere | None = None

    def __eq__(self, other: object) -> bool:
        """Whether both say the same."""
        return isinstance(other, Outcome) and self._says() == other._says()

    def __hash__(self) -> int:
        """Equal ones have the same."""
        return hash(self._says())

    def _says(self) -> tuple[int, int, Failure | None, bytes]:
        return self.room, self.attempt, self.failure, self.aux

    @property
    def succeeded(self) -> bool:
        """Whether KV and side data are in place on every decode rank."""
        return self.failure is None


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """This side's pages of the handoff are quiet: they may be used again."""

    room: Room
    attempt: Count


Event = Outcome | Released
