"""The state machine of one handoff. Pure: no asyncio, no sockets, no clock, no logging in it.

Theory of operation
    Events go in through one door, ``HandoffMachine.apply``; effects come out and somebody else
    carries them out. What each state does with each event is data: ``TABLE``. A pair that is
    missing there raises ``InvalidTransitionError`` and changes nothing.

        OPEN     offered and/or prefilling; no clock runs
        WAITING  prefill is complete on some rank; something is still missing
        MOVING   all ranks of both groups are in; only bytes are missing
        SUCCEEDED, FAILED   the verdict; decided once, never changed

    A *leg* is a (prefill rank, decode rank) pair. A *move* is one chunk of a leg, numbered from 0
    within the handoff. A move starts as soon as its source and destination pages are both known.

    The pages of each side are held until nothing can read (prefill) or write (decode) them any
    more. The verdict never waits for that, and ``Release`` never comes before it.

    What arrives after the verdict is a ``Late`` effect: counted and logged, never a change of the
    verdict and never silence. What a rank must not do (send twice after its last chunk, say) is a
    ``Refuse`` effect: the sender is told, the handoff goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from coordinator.errors import InvalidTransitionError
from coordinator.messages import PAGE_BYTES, Role
from coordinator.reasons import Failure, Reason

#: How many transitions a handoff remembers of its own story.
STORY_LENGTH: Final = 16


class State(StrEnum):
    """Where a handoff stands."""

    OPEN = "open"
    WAITING = "waiting"
    MOVING = "moving"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Whether the verdict is known."""
        return self in {State.SUCCEEDED, State.FAILED}


Leg = tuple[int, int]


class Pairing(msgspec.Struct, frozen=True):
    """Which ranks exchange pages; shared by all handoffs between the same two groups.

    ``by_source[p]`` and ``by_destination[d]`` list the legs of that rank.
    """

    prefill_world: int
    decode_world: int
    by_source: tuple[tuple[Leg, ...], ...]
    by_destination: tuple[tuple[Leg, ...], ...]

    @classmethod
    def of(cls, prefill_world: int, decode_world: int, legs: tuple[Leg, ...]) -> Pairing:
        """Index the legs from both ends."""
        return cls(
            prefill_world,
            decode_world,
            tuple(tuple(leg for leg in legs if leg[0] == rank) for rank in range(prefill_world)),
            tuple(tuple(leg for leg in legs if leg[1] == rank) for rank in range(decode_world)),
        )


# --- events ----------------------------------------------------------------------------------
# msgspec structs, not dataclasses: building a frozen dataclass costs 6 times as much, on a path
# that is taken some 30 times per TP-8 handoff.


class Opened(msgspec.Struct, frozen=True):
    """A prefill rank has queued the room."""

    rank: int


class Sent(msgspec.Struct, frozen=True):
    """A prefill rank's next pages (packed int32); ``last`` means that its prefill is complete."""

    rank: int
    pages: bytes
    last: bool
    aux: bytes = b""


class Offered(msgspec.Struct, frozen=True):
    """A decode rank's pages, which start behind the ``prefix_pages`` that it already has."""

    rank: int
    pages: bytes
    prefix_pages: int


class Extended(msgspec.Struct, frozen=True):
    """A decode rank still has the room in its queue."""

    rank: int


class Paired(msgspec.Struct, frozen=True):
    """Both groups are known."""

    pairing: Pairing


class Moved(msgspec.Struct, frozen=True):
    """All bytes of a move are in place, and both ends of it are quiet."""

    move: int


class MoveFailed(msgspec.Struct, frozen=True):
    """A move has failed; its pages may or may not be quiet already."""

    move: int
    failure: Failure
    source_quiet: bool
    destination_quiet: bool


class MoveQuiet(msgspec.Struct, frozen=True):
    """One side's pages of a failed or given-up move are quiet now."""

    move: int
    side: Role


class Aborted(msgspec.Struct, frozen=True):
    """Somebody else decided that the handoff has failed: a clock, a lost rank, a cancel."""

    failure: Failure


Event = Opened | Sent | Offered | Extended | Paired | Moved | MoveFailed | MoveQuiet | Aborted


# --- effects ---------------------------------------------------------------------------------


class StartClock(msgspec.Struct, frozen=True):
    """Prefill is complete on its first rank: the bound on everything that is missing starts."""


class ExtendClock(msgspec.Struct, frozen=True):
    """Decode asked for more time."""


class StartMove(msgspec.Struct, frozen=True):
    """Write ``source_pages`` of a prefill rank onto ``destination_pages`` of a decode rank."""

    move: int
    leg: Leg
    source_pages: bytes
    destination_pages: bytes


class AllMoving(msgspec.Struct, frozen=True):
    """Every rank of both groups is in; only bytes are missing."""


class Revoke(msgspec.Struct, frozen=True):
    """The verdict is in: what is not yet posted of these moves need not be."""

    moves: tuple[int, ...]


class Conclude(msgspec.Struct, frozen=True):
    """The verdict; ``failure`` is None for success. Exactly one per handoff."""

    failure: Failure | None


class Release(msgspec.Struct, frozen=True):
    """The pages of one side are quiet. Exactly one per side, never before ``Conclude``."""

    side: Role


class Late(msgspec.Struct, frozen=True):
    """The event came after the verdict and changed nothing in it."""

    event: Event


class Refuse(msgspec.Struct, frozen=True):
    """The sender broke the protocol with this event; the handoff is as it was."""

    message: str


Effect = StartClock | ExtendClock | StartMove | AllMoving | Revoke | Conclude | Release | Late | Refuse


# --- the machine -----------------------------------------------------------------------------


class _Source(msgspec.Struct):
    """What one prefill rank has sent so far."""

    pages: bytes = b""
    last: bool = False

    @property
    def count(self) -> int:
        return len(self.pages) // PAGE_BYTES


class _Target(msgspec.Struct, frozen=True):
    """What one decode rank has offered."""

    pages: bytes
    prefix_pages: int

    @property
    def count(self) -> int:
        """Pages of the whole room, as this rank sees it."""
        return self.prefix_pages + len(self.pages) // PAGE_BYTES


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
        "_cursors",
        "_lasts",
        "_moves",
        "_next_move",
        "_pairing",
        "_released",
        "_row",
        "_sources",
        "_targets",
        "attempt",
        "aux",
        "concluded",
        "failure",
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
        self.story: list[Step] = []
        self._row = TABLE[State.OPEN]
        self._pairing: Pairing | None = None
        self._sources: dict[int, _Source] = {}
        self._targets: dict[int, _Target] = {}
        self._cursors: dict[Leg, int] = {}
        self._moves: dict[int, _Move] = {}
        self._next_move = 0
        self._lasts = 0
        self._released: list[Role] = []

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
    def held(self) -> tuple[Role, ...]:
        """The sides whose pages are not released."""
        return tuple(side for side in Role if side not in self._released)

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The moves whose source or destination pages are still in use."""
        return tuple(self._moves)

    @property
    def page_count(self) -> int:
        """Pages of the room, as far as known from its longest list."""
        counts = [source.count for source in self._sources.values()]
        return max(counts + [target.count for target in self._targets.values()], default=0)

    def sent_pages(self, rank: int) -> int:
        """Pages that a prefill rank has sent so far."""
        source = self._sources.get(rank)
        return 0 if source is None else source.count

    def missing(self, prefill: str = "prefill", decode: str = "decode") -> str:
        """Say what a handoff that is not over still waits for."""
        parts: list[str] = []
        if not self._sources:
            parts.append(f"any sign of prefill for this room from {prefill}")
        if not self._targets:
            parts.append(f"the offer of {decode}")
        if self._pairing is not None:
            for rank in range(self._pairing.prefill_world):
                if self._sources and not (rank in self._sources and self._sources[rank].last):
                    parts.append(f"prefill-complete of {prefill}/{rank}")
            for rank in range(self._pairing.decode_world):
                if self._targets and rank not in self._targets:
                    parts.append(f"the offer of {decode}/{rank}")
        legs = sorted({move.leg for move in self._moves.values()})
        parts.extend(f"the leg {prefill}/{p} -> {decode}/{d}" for p, d in legs)
        return ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")

    def validate(self) -> None:
        """Assert every invariant; called after each step of each test.

        Raises:
            AssertionError: naming the invariant that is broken.

        """
        assert self.concluded == int(self.state.terminal), "exactly one verdict, in a terminal state"
        assert (self.failure is not None) == (self.state is State.FAILED), "a failure iff FAILED"
        assert len(set(self._released)) == len(self._released), "a side is released once"
        if not self.state.terminal:
            assert not self._released, "nothing is released before the verdict"
            assert all(move.source_held and move.destination_held for move in self._moves.values())
        if self.state is State.SUCCEEDED:
            assert not self._moves, "no move is outstanding after success"
            assert set(self._released) == set(Role), "success releases both sides at once"
        if self.state is State.FAILED:
            moves = self._moves.values()
            assert (Role.PREFILL in self._released) != any(m.source_held for m in moves)
            assert (Role.DECODE in self._released) != any(m.destination_held for m in moves)
        if self.state is State.MOVING:
            assert self._all_in(), "MOVING means that every rank is in"
            assert self._moves, "MOVING means that bytes are missing"
        assert self._lasts == sum(source.last for source in self._sources.values())
        for (p, d), cursor in self._cursors.items():
            assert cursor <= min(self._sources[p].count, self._targets[d].count), "a leg ran ahead"

    # Handlers, one per kind of event

    def _opened(self, event: Opened) -> list[Effect]:
        source = self._sources.setdefault(event.rank, _Source())
        return [Refuse("opened after its last chunk")] if source.last else []

    def _sent(self, event: Sent) -> list[Effect]:
        source = self._sources.setdefault(event.rank, _Source())
        if source.last:
            return [Refuse("sent again after its last chunk")]
        source.pages = source.pages + event.pages if source.pages else event.pages
        effects: list[Effect] = []
        if event.last:
            source.last = True
            self._lasts += 1
            if event.rank == 0:
                self.aux = event.aux
            if self._lasts == 1:
                self._enter(State.WAITING)
                effects.append(StartClock())
        return self._advance(effects, self._pairing.by_source[event.rank] if self._pairing else ())

    def _offered(self, event: Offered) -> list[Effect]:
        if event.rank in self._targets:
            return [Refuse("offered twice")]
        self._targets[event.rank] = _Target(event.pages, event.prefix_pages)
        return self._advance([], self._pairing.by_destination[event.rank] if self._pairing else ())

    def _paired(self, event: Paired) -> list[Effect]:
        if self._pairing is not None:
            message = f"room {self.room} attempt {self.attempt} is paired already"
            raise InvalidTransitionError(message)
        self._pairing = event.pairing
        legs = [leg for rank in self._sources for leg in event.pairing.by_source[rank]]
        return self._advance([], tuple(legs))

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
        self._row = TABLE[state]

    def _tell(self, now_s: float, event: Event) -> None:
        cause = type(event).__name__
        if isinstance(event, Aborted | MoveFailed):
            cause = f"{cause} {event.failure.reason}: {event.failure.message}"
        elif isinstance(event, Opened | Sent | Offered | Extended):
            cause = f"{cause} by rank {event.rank}"
        self.story.append(Step(now_s, self.state, cause))
        if len(self.story) > STORY_LENGTH:
            del self.story[1]

    def _all_in(self) -> bool:
        pairing = self._pairing
        return (
            pairing is not None
            and self._lasts == pairing.prefill_world
            and len(self._targets) == pairing.decode_world
        )

    def _advance(self, effects: list[Effect], legs: tuple[Leg, ...]) -> list[Effect]:
        """Start what can start on ``legs``; then see whether the whole handoff is complete."""
        for leg in legs:
            problem = self._start(leg, effects)
            if problem is not None:
                return effects + self._fail(problem)
        if self._all_in():
            if not self._moves:
                self._enter(State.SUCCEEDED)
                self.concluded += 1
                self._forget()
                effects.append(Conclude(None))
                return effects + self._release()
            if self.state is State.WAITING:
                self._enter(State.MOVING)
                effects.append(AllMoving())
        return effects

    def _start(self, leg: Leg, effects: list[Effect]) -> Failure | None:
        """Start the pages of a leg whose two ends are known, or say why they can never match."""
        source = self._sources.get(leg[0])
        target = self._targets.get(leg[1])
        if source is None or target is None:
            return None
        if source.count > target.count or (source.last and source.count < target.count):
            return Failure(
                Reason.REJECTED,
                "",
                f"room {self.room}: prefill rank {leg[0]} sent {source.count} pages"
                f"{'' if source.last else ' so far'}, decode rank {leg[1]} offered "
                f"{target.count - target.prefix_pages} behind a prefix of {target.prefix_pages}",
            )
        first = max(self._cursors.get(leg, 0), target.prefix_pages)
        if source.count <= first:
            return None
        self._cursors[leg] = source.count
        move = self._next_move
        self._next_move += 1
        self._moves[move] = _Move(leg)
        start = (first - target.prefix_pages) * PAGE_BYTES
        length = (source.count - first) * PAGE_BYTES
        effects.append(
            StartMove(
                move, leg, source.pages[first * PAGE_BYTES :], target.pages[start : start + length]
            )
        )
        return None

    def _fail(self, failure: Failure) -> list[Effect]:
        self._enter(State.FAILED)
        self.failure = failure
        self.concluded += 1
        self._forget()
        effects: list[Effect] = [Conclude(failure)]
        if self._moves:
            effects.append(Revoke(tuple(self._moves)))
        return effects + self._release()

    def _forget(self) -> None:
        """Drop the page lists: nothing starts after the verdict."""
        for source in self._sources.values():
            source.pages = b""
        self._cursors.clear()

    def _mark(self, number: int, move: _Move, *, source: bool, destination: bool) -> None:
        move.source_held = move.source_held and not source
        move.destination_held = move.destination_held and not destination
        if not (move.source_held or move.destination_held):
            del self._moves[number]

    def _release(self) -> list[Effect]:
        """Release each side that nothing holds any more, once."""
        effects: list[Effect] = []
        moves = self._moves.values()
        if Role.PREFILL not in self._released and not any(move.source_held for move in moves):
            self._released.append(Role.PREFILL)
            effects.append(Release(Role.PREFILL))
        if Role.DECODE not in self._released and not any(move.destination_held for move in moves):
            self._released.append(Role.DECODE)
            effects.append(Release(Role.DECODE))
        return effects


# A handler takes the kind of event of its row; the table is what guarantees it, not the type.
_Handler = Callable[[HandoffMachine, "Event"], "list[Effect]"]
_M = HandoffMachine

#: What each state does with each event. Terminal rows are explicit; a pair that stands nowhere is
#: a bug of the caller: in MOVING both groups are known, so ``Paired`` cannot come again; a move
#: is given up only by the verdict, so ``MoveQuiet`` cannot come before it.
TABLE: Final[dict[State, dict[type[Event], _Handler]]] = {  # type: ignore[assignment]
    State.OPEN: {
        Opened: _M._opened,
        Sent: _M._sent,
        Offered: _M._offered,
        Extended: _M._extended,
        Paired: _M._paired,
        Moved: _M._moved,
        MoveFailed: _M._move_failed,
        Aborted: _M._aborted,
    },
    State.WAITING: {
        Opened: _M._opened,
        Sent: _M._sent,
        Offered: _M._offered,
        Extended: _M._extended_running,
        Paired: _M._paired,
        Moved: _M._moved,
        MoveFailed: _M._move_failed,
        Aborted: _M._aborted,
    },
    State.MOVING: {
        Opened: _M._opened,
        Sent: _M._sent,
        Offered: _M._offered,
        Extended: _M._extended_running,
        Moved: _M._moved,
        MoveFailed: _M._move_failed,
        Aborted: _M._aborted,
    },
    State.SUCCEEDED: dict.fromkeys(
        (Opened, Sent, Offered, Extended, Paired, Moved, MoveFailed, MoveQuiet, Aborted), _M._late
    ),
    State.FAILED: {
        Opened: _M._late,
        Sent: _M._late,
        Offered: _M._late,
        Extended: _M._late,
        Paired: _M._late,
        Moved: _M._moved_late,
        MoveFailed: _M._move_failed_late,
        MoveQuiet: _M._quieted,
        Aborted: _M._late,
    },
}
