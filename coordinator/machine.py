"""The state machine of one handoff. Pure: no asyncio, no sockets, no clock, no logging in it.

Theory of operation
    Events go in through one door, ``HandoffMachine.apply``; effects come out and somebody else
    carries them out. What each state does with each event is data: ``table.TABLE``. A pair that is
    missing there raises ``InvalidTransitionError`` and changes nothing.

        OPEN     offered and/or prefilling; no clock runs
        WAITING  prefill is complete on some rank; something is still missing
        MOVING   all ranks of both groups are in; only bytes are missing
        SUCCEEDED, FAILED   the verdict; decided once, never changed

    A *leg* is a (prefill rank, decode rank) pair. A *move* is one chunk of a leg, numbered from 0
    within the handoff. A move starts as soon as its source and destination pages are both known.
    An engine that moves the pages by itself (``Pairing.own``) has one move for each prefill rank.

    The pages of each side are held until nothing can read (prefill) or write (decode) them any
    more. The verdict never waits for that, and ``Release`` never comes before it.

    What arrives after the verdict is a ``Late`` effect: counted and logged, never a change of the
    verdict and never silence. What a rank must not do (send twice after its last chunk, say) is a
    ``Refuse`` effect: the sender is told, the handoff goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from coordinator.errors import InvalidTransitionError
from coordinator.events import (
    INHERITED,
    OWN,
    Aborted,
    AllMoving,
    Conclude,
    Effect,
    Event,
    ExtendClock,
    Extended,
    Inherited,
    Late,
    Leg,
    Moved,
    MoveFailed,
    MoveQuiet,
    Offered,
    Opened,
    Paired,
    Refuse,
    Release,
    Revoke,
    Sent,
    StartClock,
    StartMove,
    State,
)
from coordinator.legs import Legs
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason
from coordinator.table import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

_SIDES: Final = tuple(Role)
_RELEASES: Final = {side: Release(side) for side in Role}
_OF_A_RANK: Final = (Opened, Sent, Offered, Extended)


# --- the machine -----------------------------------------------------------------------------


class _Move(msgspec.Struct):
    """A move that is not done; whether each side's pages are still in use by it."""

    leg: Leg
    source_held: bool = True
    destination_held: bool = True


class Step(msgspec.Struct, frozen=True):
    """One line of a handoff's story: when (the caller's clock), into which state, by what."""

    at_s: float
    state: State
    cause: str


class HandoffMachine:
    """One attempt to move one room's KV. See the module's theory of operation."""

    __slots__ = (
        "_legs",
        "_moves",
        "_next_move",
        "_row",
        "attempt",
        "aux",
        "concluded",
        "failure",
        "held",
        "room",
        "state",
        "story",
    )

    def __init__(self, room: int, attempt: int) -> None:
        """Start in ``OPEN``, knowing nothing but the key."""
        self.room = room
        self.attempt = attempt
        self.state = State.OPEN
        self.failure: Failure | None = None
        self.aux = b""
        self.concluded = 0
        self.held: tuple[Role, ...] = _SIDES
        self.story: list[Step] = []
        self._row = _ROWS[State.OPEN]
        self._legs = Legs()
        self._moves: dict[int, _Move] = {}
        self._next_move = 0

    def apply(self, event: Event, now_s: float = 0.0) -> list[Effect]:
        """Take one event; return what must be done, in order. ``now_s`` only dates the story.

        Raises:
            InvalidTransitionError: the table has no row for this state and event.

        """
        handler = self._row.get(type(event))
        if handler is None:
            message = f"room {self.room} attempt {self.attempt}: {event} in state {self.state}; {self.story}"
            raise InvalidTransitionError(message)
        before = self.state
        effects = handler(self, event)
        if self.state is not before:
            self._tell(now_s, event)
        return effects

    # What an observer may ask

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The moves whose source or destination pages are still in use."""
        return tuple(self._moves)

    @property
    def legs(self) -> Legs:
        """What each rank has said so far; to be looked at only."""
        return self._legs

    def sent_pages(self, rank: int) -> int:
        """Pages that a prefill rank has sent so far."""
        return self._legs.sent_pages(rank)

    def missing(self, prefill: str = "prefill", decode: str = "decode") -> str:
        """Say what a handoff that is not over still waits for."""
        return self._legs.missing(
            prefill, decode, {move.leg for number, move in self._moves.items() if number != INHERITED}
        )

    def validate(self) -> None:
        """Assert every invariant; called after each step of each test.

        Raises:
            AssertionError: naming the invariant that is broken.

        """
        assert self.concluded == int(self.state.terminal), "exactly one verdict, in a terminal state"
        assert (self.failure is not None) == (self.state is State.FAILED), "a failure iff FAILED"
        if not self.state.terminal:
            assert self.held == _SIDES, "nothing is released before the verdict"
            assert all(move.source_held and move.destination_held for move in self._moves.values())
        if self.state is State.SUCCEEDED:
            assert not self._moves, "no move is outstanding after success"
            assert not self.held, "success releases both sides at once"
        if self.state is State.FAILED:
            moves = self._moves.values()
            assert (Role.PREFILL in self.held) == any(m.source_held for m in moves)
            assert (Role.DECODE in self.held) == any(m.destination_held for m in moves)
        if self.state is State.MOVING:
            assert self._legs.all_in, "MOVING means that every rank is in"
            assert self._moves, "MOVING means that bytes are missing"
        self._legs.validate()

    # Handlers, one per kind of event

    def _opened(self, event: Opened) -> list[Effect]:
        return [] if self._legs.open(event.rank) else [Refuse("opened after its last chunk")]

    def _sent(self, event: Sent) -> list[Effect]:
        if not self._legs.open(event.rank):
            return [Refuse("sent again after its last chunk")]
        effects: list[Effect] = []
        legs = self._legs.send(event.rank, event.pages, last=event.last)
        if event.last:
            if event.rank == 0:
                self.aux = event.aux
            if self._legs.complete == 1:
                self._enter(State.WAITING)
                effects.append(StartClock())
        return self._advance(effects, legs)

    def _offered(self, event: Offered) -> list[Effect]:
        legs = self._legs.offer(event.rank, event.pages, event.prefix_pages)
        return [Refuse("offered twice")] if legs is None else self._advance([], legs)

    def _paired(self, event: Paired) -> list[Effect]:
        if self._legs.paired:
            message = f"room {self.room} attempt {self.attempt} is paired already"
            raise InvalidTransitionError(message)
        legs = self._legs.pair(event.pairing)
        if event.pairing.own:
            # From the start: a rank may be sending chunks before it speaks of the room.
            self._moves.update((rank, _Move((rank, OWN))) for rank in range(event.pairing.prefill_world))
        return self._advance([], legs)

    def _inherited(self, _event: Inherited) -> list[Effect]:
        self._moves[INHERITED] = _Move((INHERITED, INHERITED))
        return []

    def _extended(self, _event: Extended) -> list[Effect]:
        return []

    def _extended_running(self, _event: Extended) -> list[Effect]:
        return [ExtendClock()]

    def _moved(self, event: Moved) -> list[Effect]:
        if self._moves.pop(event.move, None) is None:
            return [Late(event)]
        return self._advance([], ())

    def _move_failed(self, event: MoveFailed) -> list[Effect]:
        move = self._moves.get(event.move)
        if move is None:
            return [Late(event)]
        self._mark(event.move, move, source=event.source_quiet, destination=event.destination_quiet)
        return self._fail(event.failure)

    def _aborted(self, event: Aborted) -> list[Effect]:
        return self._fail(event.failure)

    def _late(self, event: Event) -> list[Effect]:
        return [Late(event)]

    def _moved_late(self, event: Moved) -> list[Effect]:
        effects: list[Effect] = [Late(event)]
        move = self._moves.get(event.move)
        if move is not None:
            self._mark(event.move, move, source=True, destination=True)
        return effects + self._release()

    def _move_failed_late(self, event: MoveFailed) -> list[Effect]:
        effects: list[Effect] = [Late(event)]
        move = self._moves.get(event.move)
        if move is not None:
            self._mark(event.move, move, source=event.source_quiet, destination=event.destination_quiet)
        return effects + self._release()

    def _quieted(self, event: MoveQuiet) -> list[Effect]:
        move = self._moves.get(event.move)
        if move is None:
            return []
        self._mark(
            event.move,
            move,
            source=event.side is Role.PREFILL,
            destination=event.side is Role.DECODE,
        )
        return self._release()

    # What they share

    def _enter(self, state: State) -> None:
        self.state = state
        self._row = _ROWS[state]

    def _tell(self, now_s: float, event: Event) -> None:
        cause = type(event).__name__
        if isinstance(event, _OF_A_RANK):
            cause = f"{cause} by rank {event.rank}"
        if self.failure is not None:
            cause = f"{cause} {self.failure.reason}: {self.failure.message}"
        # A handoff is never twice in one state, so this is short.
        self.story.append(Step(now_s, self.state, cause))

    def _advance(self, effects: list[Effect], legs: tuple[Leg, ...]) -> list[Effect]:
        """Start what can start on ``legs``; then see whether the whole handoff is complete."""
        for leg in legs:
            pages = self._legs.next(leg)
            if isinstance(pages, str):
                return effects + self._fail(Failure(Reason.REJECTED, "", f"room {self.room}: {pages}"))
            if pages is not None:
                self._moves[self._next_move] = _Move(leg)
                effects.append(StartMove(self._next_move, leg, *pages))
                self._next_move += 1
        if self._legs.all_in:
            if not self._moves:
                self._conclude(State.SUCCEEDED)
                effects.append(Conclude(None))
                return effects + self._release()
            if self.state is State.WAITING:
                self._enter(State.MOVING)
                effects.append(AllMoving())
        return effects

    def _conclude(self, state: State) -> None:
        self._enter(state)
        self.concluded += 1
        self._legs.forget()

    def _fail(self, failure: Failure) -> list[Effect]:
        self._conclude(State.FAILED)
        self.failure = failure
        effects: list[Effect] = [Conclude(failure)]
        if self._moves:
            effects.append(Revoke(tuple(self._moves)))
        return effects + self._release()

    def _mark(self, number: int, move: _Move, *, source: bool, destination: bool) -> None:
        move.source_held = move.source_held and not source
        move.destination_held = move.destination_held and not destination
        if not (move.source_held or move.destination_held):
            del self._moves[number]

    def _release(self) -> list[Effect]:
        """Release each side that nothing holds any more, once."""
        before, self.held = self.held, self._in_use()
        return [_RELEASES[side] for side in before if side not in self.held]

    def _in_use(self) -> tuple[Role, ...]:
        if not self._moves:
            return ()
        moves = self._moves.values()
        in_use = {
            Role.PREFILL: any(move.source_held for move in moves),
            Role.DECODE: any(move.destination_held for move in moves),
        }
        return tuple(side for side in self.held if in_use[side])


_ROWS: Final[dict[State, dict[type[Event], Callable[[HandoffMachine, Any], list[Effect]]]]] = {
    state: {event: getattr(HandoffMachine, name) for event, name in row.items()}
    for state, row in TABLE.items()
}
