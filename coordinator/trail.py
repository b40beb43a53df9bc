"""What a handoff leaves in the log: a line for each step, always with the same keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.logs import get_logger

if TYPE_CHECKING:
    from coordinator.handoff import Handoff
    from coordinator.messages import Role
    from coordinator.reasons import Failure

_log = get_logger()


def who(handoff: Handoff) -> dict[str, object]:
    """Which handoff it is, and between whom."""
    return {
        "group": handoff.prefill.name if handoff.prefill else None,
        "decode": handoff.decode.name if handoff.decode else None,
        "room": handoff.machine.room,
        "attempt": handoff.machine.attempt,
    }


def step(handoff: Handoff, name: str) -> None:
    """Log a step of a handoff's trail, with how long it took up to here."""
    now_s = asyncio.get_running_loop().time()
    complete_s = handoff.complete_at_s
    _log.info(
        name,
        **who(handoff),
        total_s=round(now_s - handoff.opened_at_s, 4),
        after_prefill_s=round(now_s - complete_s, 4) if complete_s else None,
    )


def outcome(handoff: Handoff) -> None:
    """Log a verdict."""
    failure = handoff.machine.failure
    complete_s = handoff.complete_at_s
    _log.info(
        "handoff.outcome",
        **who(handoff),
        **ending(failure),
        total_s=round(handoff.concluded_at_s - handoff.opened_at_s, 4),
        after_prefill_s=round(handoff.concluded_at_s - complete_s, 4) if complete_s else None,
        bytes=handoff.moved_bytes,
        held=handoff.machine.held,
    )


def released(handoff: Handoff, side: Role) -> None:
    """Log that one side is quiet; one line for both where it is the same moment."""
    first = handoff.released_together is None
    if first:
        handoff.released_together = not handoff.machine.held
    if first and handoff.released_together:
        return  # The other side follows: one line for both.
    held_s = asyncio.get_running_loop().time() - handoff.concluded_at_s
    _log.info(
        "handoff.released",
        **who(handoff),
        side="both" if handoff.released_together else side.value,
        held_s=round(held_s, 4),
    )


def ending(failure: Failure | None) -> dict[str, object]:
    """How the line of an outcome tells it."""
    if failure is None:
        return {"outcome": "succeeded"}
    return {
        "outcome": "failed",
        "reason": failure.reason,
        "origin": failure.origin,
        "message": failure.message,
    }
