"""The client of a prefill engine that moves its pages by itself: it tells, and is told the verdict.

No worker is spawned for such a rank, and the coordinator sees neither its memory nor its pages. It is
asked for nothing but what only the engine can know: that prefill is complete, how this rank's own
transfer ended, and when nothing reads the pages of a failed handoff any more.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, Self

from coordinator.client.introduction import introduction_without_pages
from coordinator.client.proof import Proof
from coordinator.client.rank import ITEM_BYTES, Rank, room_number
from coordinator.client.settings import DEFAULTS
from coordinator.client.standing import RankState
from coordinator.errors import ProtocolError
from coordinator.messages import LegDone, LegFailed, LegQuiet, Send

if TYPE_CHECKING:
    from typing import SupportsIndex

    from coordinator.client.settings import ClientSettings

_MAX_MESSAGE: Final = 4096
_MAX_ATTEMPT: Final = 2**62


class SupervisedRank(Rank):
    """A rank of a prefill engine that moves the pages by itself; the coordinator decides and bounds.

    The coordinator must have ``backend.name = "external"``.
    """

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        group: str,
        rank: int,
        world_size: int,
        settings: ClientSettings = DEFAULTS,
    ) -> Self:
        """Join ``group`` at the coordinator; returns at once, see ``wait_ready``.

        Args:
            address: the coordinator's control address, ``ipc://...`` or ``tcp://host:port``.
            group: the engine's name, the same on all its ranks.
            rank: this rank's number, from 0.
            world_size: how many ranks the engine has.
            settings: bounds.

        Raises:
            ConfigError: the address cannot be used.
            ProtocolError: a name or a number is not acceptable.

        """
        hello = introduction_without_pages(address, group, rank, world_size)
        return cls(address, hello, settings, lambda _: NoProof())

    def ready_head(self) -> bytes | None:
        """Return ``head`` if all ranks of the group hear the coordinator at this moment, else None.

        Unlike two looks at ``state`` and ``head``, this cannot return a token that a rank which was
        just lost does not reach.
        """
        return self._io.head_if(RankState.READY)

    def complete(self, room: SupportsIndex) -> None:
        """Tell that prefill of the room is complete on this rank: the bound on the rest begins.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        self._io.say(Send(room_number(room), inbox.drained, b"", last=True), ITEM_BYTES, inbox)

    def leg_done(self, room: SupportsIndex) -> None:
        """Tell that this rank's pages have arrived, and that it reads them no more.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        self._io.say(LegDone(room_number(room), inbox.drained), ITEM_BYTES, inbox)

    def leg_failed(self, room: SupportsIndex, message: str, *, quiet: bool = False) -> None:
        """Tell that this rank's transfer has failed; ``quiet``: it reads the pages no more.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        item = LegFailed(room_number(room), inbox.drained, message[:_MAX_MESSAGE], quiet)
        self._io.say(item, ITEM_BYTES + 4 * len(message), inbox)

    def leg_quiet(self, room: SupportsIndex, attempt: SupportsIndex) -> None:
        """Tell that this rank reads the pages of a failed attempt no more.

        They are released when all ranks have told so. Say it once for each failure, also where this
        rank's own transfer had been done or quiet before: a coordinator that was restarted meanwhile may
        not know of it.

        Args:
            room: the request's id.
            attempt: that of the ``Outcome`` that told the failure.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room or attempt can be.

        """
        inbox = self._lives.inbox
        self._io.say(LegQuiet(room_number(room), inbox.drained, _attempt_number(attempt)), ITEM_BYTES, inbox)


def _attempt_number(attempt: SupportsIndex) -> int:
    try:
        number = operator.index(attempt)
    except TypeError as error:
        message = f"attempt is {attempt!r}, must be an integer"
        raise ProtocolError(message) from error
    if not 0 < number <= _MAX_ATTEMPT:
        message = f"attempt is {number}, must be that of the outcome, from 1 on"
        raise ProtocolError(message)
    return number


class NoProof(Proof):
    """Nobody but the engine itself reads its pages: what there is to prove, the engine knows."""

    def lost(self) -> None:
        """See ``Proof.lost``."""

    def prepare(self) -> None:
        """See ``Proof.prepare``."""

    def holds(self, instance: int) -> bool:
        """See ``Proof.holds``."""
        del instance
        return True

    def welcomed(self) -> None:
        """See ``Proof.welcomed``."""

    def close(self) -> None:
        """See ``Proof.close``."""
