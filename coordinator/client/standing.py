"""Where a client stands with its coordinator, and how it is told to people."""

from __future__ import annotations

import logging
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from coordinator.errors import RefusedError

if TYPE_CHECKING:
    from coordinator.errors import CoordinatorError
    from coordinator.messages import Refused

MAX_REFUSALS: Final = 1024

logger = logging.getLogger(__name__)


class RankState(StrEnum):
    """Where a client stands with its coordinator."""

    #: No coordinator has accepted this rank yet.
    CONNECTING = "connecting"
    #: The coordinator knows this rank; other ranks of the group are still missing.
    JOINED = "joined"
    #: All ranks of the group hear the coordinator.
    READY = "ready"
    #: The coordinator was there, and is not now. Calls are queued.
    COORDINATOR_AWAY = "coordinator_away"
    #: The coordinator does not accept this rank. Calls raise the reason.
    REFUSED = "refused"
    #: Closed by the engine, or the I/O thread died. Calls raise the cause.
    CLOSED = "closed"


class Standing:
    """The state of one client, and what it was told.

    Attributes:
        name: ``group/rank``.
        address: the coordinator's.
        state: see ``RankState``.
        fault: why nothing works any more, if so; every call of the engine raises it.
        refusals: what was not accepted of this rank alone, the newest ``MAX_REFUSALS``.
        outcomes: where the coordinator broadcasts.
        missing: the ranks of the group that it waits for, by number; None before a broadcast told so.
        patience_s: how long the coordinator may be away before it counts as lost; 0: for ever.

    """

    def __init__(self, name: str, address: str, patience_s: float = 0.0) -> None:
        """Start to connect."""
        self.name = name
        self.address = address
        self.state = RankState.CONNECTING
        self.fault: CoordinatorError | None = None
        self.refusals: deque[Refused] = deque(maxlen=MAX_REFUSALS)
        self.outcomes = ""
        self.missing: list[int] | None = None
        self.patience_s = patience_s
        self._last_word = ""

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self.fault is not None:
            # A fresh one each time: one object would gather the tracebacks of all its raisers.
            raise type(self.fault)(*self.fault.args) from self.fault.__cause__

    def become(self, state: RankState) -> None:
        """Change the state."""
        if state is self.state:
            return
        level = logging.WARNING if state is RankState.COORDINATOR_AWAY else logging.INFO
        logger.log(level, "%s is %s (before: %s)", self.name, state, self.state)
        self.state = state
        if state is RankState.READY:
            self._last_word = ""

    def fail(self, state: RankState, fault: CoordinatorError) -> None:
        """Nothing works any more; the first fault stays."""
        if self.fault is None:
            self.fault = fault
            self.become(state)

    def refused(self, refused: Refused) -> None:
        """Take what the coordinator does not accept."""
        logger.warning("%s was refused (%s): %s", self.name, refused.code, refused.message)
        if refused.fatal:
            message = f"the coordinator at {self.address} refuses {self.name}: {refused.message}"
            self.fail(RankState.REFUSED, RefusedError(message))
        elif refused.room:
            self.refusals.append(refused)
        else:
            self._last_word = refused.message

    def explain(self) -> str:
        """Say in a sentence what this rank is waiting for."""
        said = f"; it said: {self._last_word}" if self._last_word else ""
        match self.state:
            case RankState.CONNECTING:
                return f"no coordinator at {self.address} has accepted this rank yet{said}"
            case RankState.JOINED:
                waits = f"the coordinator at {self.address} still waits for other ranks of the group"
                return f"{waits}{self._whom()}{said}"
            case RankState.READY:
                return "all ranks of the group are there"
            case RankState.COORDINATOR_AWAY:
                bound = f" for {self.patience_s:g} s" if self.patience_s else ""
                return f"the coordinator at {self.address} is away; its return is awaited{bound}{said}"
            case RankState.REFUSED | RankState.CLOSED:
                return str(self.fault)

    def _whom(self) -> str:
        """Name who is waited for; it may be this rank, which the coordinator's broadcasts do not reach."""
        if self.missing is None:
            return f", and nothing was heard yet from {self.outcomes}, where it broadcasts"
        group = self.name.rpartition("/")[0]
        return "".join(f"{', ' if index else ': '}{group}/{rank}" for index, rank in enumerate(self.missing))
