"""The table of the state machine: what each state does with each event.

Each entry names a method of ``HandoffMachine``. Terminal rows are explicit.
"""

from __future__ import annotations

from typing import Final

from coordinator.events import (
    Aborted,
    Event,
    Extended,
    Inherited,
    Moved,
    MoveFailed,
    MoveQuiet,
    Offered,
    Opened,
    Paired,
    Sent,
    State,
)

#: What each state does with each event. Terminal rows are explicit; a pair that stands nowhere is
#: a bug of the caller: in MOVING both groups are known, so ``Paired`` cannot come again; a move
#: is given up only by the verdict, so ``MoveQuiet`` cannot come before it; what a former coordinator
#: left is taken over before anything else happens, so ``Inherited`` comes in OPEN alone.
TABLE: Final[dict[State, dict[type[Event], str]]] = {
    State.OPEN: {
        Opened: "_opened",
        Sent: "_sent",
        Offered: "_offered",
        Extended: "_extended",
        Paired: "_paired",
        Inherited: "_inherited",
        Moved: "_moved",
        MoveFailed: "_move_failed",
        Aborted: "_aborted",
    },
    State.WAITING: {
        Opened: "_opened",
        Sent: "_sent",
        Offered: "_offered",
        Extended: "_extended_running",
        Paired: "_paired",
        Moved: "_moved",
        MoveFailed: "_move_failed",
        Aborted: "_aborted",
    },
    State.MOVING: {
        Opened: "_opened",
        Sent: "_sent",
        Offered: "_offered",
        Extended: "_extended_running",
        Moved: "_moved",
        MoveFailed: "_move_failed",
        Aborted: "_aborted",
    },
    State.SUCCEEDED: dict.fromkeys(
        (Opened, Sent, Offered, Extended, Paired, Inherited, Moved, MoveFailed, MoveQuiet, Aborted), "_late"
    ),
    State.FAILED: {
        Opened: "_late",
        Sent: "_late",
        Offered: "_late",
        Extended: "_late",
        Paired: "_late",
        Inherited: "_late",
        Moved: "_moved_late",
        MoveFailed: "_move_failed_late",
        MoveQuiet: "_quieted",
        Aborted: "_late",
    },
}
