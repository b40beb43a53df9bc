"""One task per handoff. The task owns time, the state machine owns state."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Protocol

from coordinator.events import (
    Aborted,
    AllMoving,
    Conclude,
    Effect,
    Event,
    ExtendClock,
    Late,
    MoveQuiet,
    Refuse,
    Release,
    Revoke,
    StartClock,
    StartMove,
)
from coordinator.machine import HandoffMachine
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from coordinator.config import HandoffBounds
    from coordinator.groups import Group
    from coordinator.transfers import Flight


class Desk(Protocol):
    """What a handoff needs from the service around it."""

    bounds: HandoffBounds

    def start_move(self, handoff: Handoff, move: StartMove) -> None:
        """Have the bytes of a move written."""

    def revoke(self, handoff: Handoff, moves: tuple[int, ...]) -> None:
        """Tell that these moves need not be started any more."""

    def concluded(self, handoff: Handoff) -> None:
        """Tell the verdict to both groups."""

    def released(self, handoff: Handoff, side: Role) -> None:
        """Tell one side that its pages are quiet."""

    def late(self, handoff: Handoff, event: Event) -> None:
        """Count and log an event that came after the verdict."""

    def prefill_completed(self, handoff: Handoff) -> None:
        """Note that the first rank's prefill is complete: the clock runs."""

    def all_moving(self, handoff: Handoff) -> None:
        """Note that only bytes are missing."""

    async def make_quiet(self, handoff: Handoff) -> None:
        """Wait, then use force, until nothing of a failed handoff moves any more."""

    def closed(self, handoff: Handoff) -> None:
        """Forget the handoff: verdict told, all pages released."""

    def broken(self, handoff: Handoff, error: Exception) -> None:
        """Log that a handoff's task died of a bug; its pages stay held."""


class Handoff:
    """One attempt to move one room's KV pages from a prefill group to a decode group.

    Attributes:
        machine: its state.
        prefill, decode: its groups, as far as known.
        opened_at_s, complete_at_s, moving_at_s, concluded_at_s: when, on the loop's clock; 0 before.
        moved_bytes: bytes that have arrived.
        flights: its moves that are under way or not quiet yet, by number.
        held_nothing: the pages of both sides were quiet when the verdict fell.
        released_together: whether both sides were released at once; None before any was.
        told_before: its verdict, a failure, was told by a former coordinator; only its pages are left.

    """

    __slots__ = (
        "_clock",
        "_desk",
        "_due",
        "_now_s",
        "_prefill_complete",
        "_settled",
        "_started_at_s",
        "_task",
        "complete_at_s",
        "concluded_at_s",
        "decode",
        "flights",
        "held_nothing",
        "machine",
        "moved_bytes",
        "moving_at_s",
        "opened_at_s",
        "prefill",
        "released_together",
        "told_before",
    )

    def __init__(self, room: int, attempt: int, desk: Desk) -> None:
        """Create the handoff and its task. No clock runs yet."""
        loop = asyncio.get_running_loop()
        self.machine = HandoffMachine(room, attempt)
        self.prefill: Group | None = None
        self.decode: Group | None = None
        self.opened_at_s = loop.time()
        self.complete_at_s = 0.0
        self.moving_at_s = 0.0
        self.concluded_at_s = 0.0
        self.moved_bytes = 0
        self.flights: dict[int, Flight] = {}
        self.held_nothing = False
        self.released_together: bool | None = None
        self.told_before = False
        self._desk = desk
        self._now_s = loop.time
        self._due: list[Effect] | None = None  # while effects are carried out: those not done yet, and more
        self._prefill_complete = asyncio.Event()
        self._settled = asyncio.Event()
        self._clock: asyncio.Timeout | None = None
        self._started_at_s = 0.0
        self._task = loop.create_task(self._run())

    @property
    def room(self) -> int:
        """The request's id."""
        return self.machine.room

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are known so far."""
        return tuple(group for group in (self.prefill, self.decode) if group is not None)

    def missing(self) -> str:
        """What it still waits for, with the groups' names."""
        return self.machine.missing(
            self.prefill.name if self.prefill else "any prefill group",
            self.decode.name if self.decode else "any decode group",
        )

    def apply(self, event: Event) -> Refuse | None:
        """Feed the state machine and carry out its effects; returns a refusal for the sender.

        What carrying out an effect feeds to the machine comes after all that was due before: so the
        verdict is told before a release, whoever caused what.
        """
        effects = self.machine.apply(event, self._now_s())
        if effects and isinstance(effects[0], Refuse):
            return effects[0]  # it stands alone
        if self._due is not None:
            self._due += effects
        elif effects:
            self._carry_out_all(effects)
        return None

    def _carry_out_all(self, effects: list[Effect]) -> None:
        self._due = effects
        try:
            for effect in effects:  # grows meanwhile
                self._carry_out(effect)
        finally:
            self._due = None
            if self.complete_at_s:
                # Last of all: so the loop sends what has to be sent before it runs the task.
                self._prefill_complete.set()

    def _carry_out(self, effect: Effect) -> None:
        desk = self._desk
        match effect:
            case StartMove():
                self._start(effect)
            case StartClock():
                self.complete_at_s = self._started_at_s = self._now_s()
                desk.prefill_completed(self)
            case AllMoving():
                if not self.machine.state.terminal:
                    self.moving_at_s = self._now_s()
                    desk.all_moving(self)
            case Conclude():
                self.concluded_at_s = self._now_s()
                desk.concluded(self)
                self._prefill_complete.set()
                self._settled.set()
            case Release(side=side):
                desk.released(self, side)
            case Revoke(moves=moves):
                desk.revoke(self, moves)
            case ExtendClock():
                self._started_at_s = self._now_s()
                self.reschedule()
            case Late(event=late):
                desk.late(self, late)

    def _start(self, move: StartMove) -> None:
        if not self.machine.state.terminal:
            self._desk.start_move(self, move)
            return
        # A move before this one could not be started, and that was the verdict.
        for side in Role:
            self.apply(MoveQuiet(move.move, side))

    def fail(self, reason: Reason, message: str, origin: str = "") -> None:
        """Fail the handoff, unless its verdict is known."""
        if not self.machine.state.terminal:
            self.apply(Aborted(Failure(reason, origin, message)))

    def withdraw(self) -> None:
        """End without a verdict: it turns out that this attempt never was."""
        self._task.cancel()

    @property
    def due_at_s(self) -> float:
        """When it is over at the latest, on the loop's clock; infinite before prefill is complete."""
        if not self.complete_at_s:
            return math.inf
        bounds = self._desk.bounds
        return min(self._started_at_s + bounds.deadline_s, self.complete_at_s + bounds.hard_cap_s)

    def reschedule(self) -> None:
        """Let a running clock end when the bounds of today say: they, or what they count from, changed."""
        if self._clock is not None and not self._clock.expired():
            self._clock.reschedule(self.due_at_s)

    async def _run(self) -> None:
        try:
            await self._prefill_complete.wait()  # no bound: prefill may take minutes
            if not self._settled.is_set():
                await self._wait_bounded()
            if self.machine.held:
                await self._desk.make_quiet(self)
        except Exception as error:  # noqa: BLE001 - the supervised door: a bug here must not leave a room without a verdict
            self.fail(Reason.INTERNAL, f"{type(error).__name__} in the coordinator: {error}")
            self._desk.broken(self, error)
        else:
            self._desk.closed(self)

    async def _wait_bounded(self) -> None:
        """Wait for the verdict from prefill-complete on; at the deadline, make it Failed."""
        try:
            async with asyncio.timeout_at(self.due_at_s) as self._clock:
                await self._settled.wait()
        except TimeoutError:
            if not (self._clock and self._clock.expired()):
                raise
            waited_s = self._now_s() - self.complete_at_s
            self.fail(Reason.DEADLINE, f"waited {waited_s:.1f} s after prefill for {self.missing()}")
        finally:
            self._clock = None
