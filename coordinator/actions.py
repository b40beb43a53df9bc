"""What an operator can do to a running coordinator, all of it logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.errors import CoordinatorError
from coordinator.logs import get_logger
from coordinator.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from coordinator.handoff import Handoff
    from coordinator.rooms import Rooms

_log = get_logger()


class EndingError(CoordinatorError):
    """The coordinator is about to end: that cannot be taken back."""


class Actions:
    """Acts on the handoffs and on the admission of new ones.

    Attributes:
        ending: the process is about to end.
        reload: reads the configuration again; returns the keys that have changed.

    """

    def __init__(self, rooms: Rooms, reload: Callable[[], Awaitable[list[str]]]) -> None:
        """Act on ``rooms``."""
        self.ending = False
        self.reload = reload
        self._rooms = rooms

    def cancel(self, room: int, why: str) -> Handoff | None:
        """Fail the handoff of a room; None when there is none in flight."""
        handoff = self._rooms.active.get(room)
        if handoff is not None:
            _log.warning("operator.cancel", room=room, attempt=handoff.machine.attempt, why=why)
            handoff.fail(Reason.CANCELLED_BY_OPERATOR, why or "cancelled by the operator")
        return handoff

    def drain(self) -> None:
        """Admit no new handoffs; those in flight go on. Until ``resume``."""
        if not self._rooms.draining:
            _log.warning("operator.drain", in_flight=len(self._rooms.active))
        self._rooms.draining = True

    def resume(self) -> None:
        """Admit new handoffs again.

        Raises:
            EndingError: the coordinator is about to end.

        """
        if self.ending:
            message = "the coordinator is about to end, so it admits nothing any more"
            raise EndingError(message)
        if self._rooms.draining:
            _log.warning("operator.resume", in_flight=len(self._rooms.active))
        self._rooms.draining = False
