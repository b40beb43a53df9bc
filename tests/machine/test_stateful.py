"""Random events in any order, against a model that works everything out anew from plain lists.

The model never starts, stops or remembers anything by steps: after each event it asks what must be true
of all that was said so far. So it shares no idea with the machine but the design.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coordinator.errors import InvalidTransitionError
from coordinator.events import (
    INHERITED,
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
    Pairing,
    Refuse,
    Release,
    Revoke,
    Sent,
    StartClock,
    StartMove,
    State,
)
from coordinator.machine import HandoffMachine
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason

from .support import packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS: Final = settings(
    max_examples=200,
    stateful_step_count=30,
)
FAILURES: Final = [
    Failure(Reason.TRANSPORT, "decode/0", "the link broke"),
    Failure(Reason.STALLED, "decode/1", "no progress"),
    Failure(Reason.CANCELLED_BY_DECODE, "decode/0", "the client went away"),
]
#: How often a handoff that is over hears more of it, before the next one begins.
LATES: Final = 4
#: How many ranks a group has.
RANKS: Final = st.integers(1, 4)
#: Rank numbers, sides, moves and the like are drawn from here and taken modulo what there is.
ANY: Final = st.integers(0, 63)
#: The ends that examples came to, over the whole run; a generator that reaches no success tests little.
REACHED: Counter[str] = Counter()


#: Rules of single events: not for ever after the end.
goes_on: Final = precondition(lambda self: not self.over)


class Said:
    """All that the ranks said, and what must follow from it."""

    def __init__(self, prefill: int, decode: int, legs: tuple[Leg, ...]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.legs = legs
        self.paired = False
        self.sent: dict[int, list[int]] = {}
        self.last: list[int] = []  # prefill ranks that are complete, in their order
        self.aux = b""
        self.offered: dict[int, tuple[int, list[int]]] = {}  # prefix and pages

    def pairs(self, leg: Leg) -> list[tuple[int, int]]:
        """The (source page, destination page) pairs of a leg that can have moved by now."""
        if not self.paired or leg[0] not in self.sent or leg[1] not in self.offered:
            return []
        prefix, destination = self.offered[leg[1]]
        return list(zip(self.sent[leg[0]][prefix:], destination, strict=False))

    @property
    def mismatch(self) -> bool:
        """Whether two ends of a leg can never agree any more on how many pages the room has."""
        for source, target in self.legs:
            if self.paired and source in self.sent and target in self.offered:
                have = len(self.sent[source])
                want = self.offered[target][0] + len(self.offered[target][1])
                if have > want or (source in self.last and have != want):
                    return True
        return False

    @property
    def all_in(self) -> bool:
        return self.paired and len(self.last) == self.prefill and len(self.offered) == self.decode


class AnyOrder(RuleBasedStateMachine):
    """One handoff between two groups; each rule is one event, legal or not."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        prefill, decode = data.draw(RANKS), data.draw(RANKS)
        every = [(p, d) for p in range(prefill) for d in range(decode)]
        shape = data.draw(st.sampled_from(["rank by rank", "all to all", "any"]))
        if shape == "rank by rank" and prefill == decode:
            legs = [(rank, rank) for rank in range(prefill)]
        elif shape == "any":
            legs = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
        else:
            legs = every
        self.said = Said(prefill, decode, tuple(legs))
        self.pairing = Pairing.of(prefill, decode, tuple(legs))
        self.total = data.draw(st.integers(0, 5))  # pages that the room has, if all ranks agree
        self.machine = HandoffMachine(7, 1)
        self.sound = True  # until an assertion fails; then the end proves nothing more
        self.now_s = 0.0
        self.next_page = 100
        self.state = State.OPEN
        self.failure: Failure | None = None
        self.started: dict[Leg, list[tuple[int, int]]] = {leg: [] for leg in legs}
        self.holds: dict[int, set[Role]] = {}  # moves that are not quiet, and the sides that they hold
        self.moves = 0
        self.effects: Counter[type[Effect]] = Counter()
        self.released: list[Role] = []
        self.lates = 0
        self.was_held = False  # whether it failed with pages that were not quiet
        self.go_on(data.draw(st.lists(ANY, max_size=20)))

    # --- one event, and everything that must be true of its effects -----------------------------

    def apply(self, event: Event, *, ends: Failure | None = None, late: bool = False) -> list[Effect]:
        """Apply an event that is legal in this state. The facts in ``said`` have it already.

        Args:
            event: what happens.
            ends: the failure that it brings, if any.
            late: whether it changes nothing and must be told as late.

        """
        over = self.state.terminal
        self.sound = False
        self.now_s += 1.0
        effects = self.machine.apply(event, self.now_s)
        self.machine.validate()
        assert any(isinstance(effect, Late) for effect in effects) is late
        self.lates += late
        if late:
            assert effects[0] == Late(event)
        for effect in effects:
            self.note(effect, over=over)
        if not over:
            self.judge(ends)
        self.check_releases()
        self.sound = True
        return effects

    def note(self, effect: Effect, *, over: bool) -> None:
        self.effects[type(effect)] += 1
        match effect:
            case StartMove(move=move, leg=leg, source_pages=source, destination_pages=destination):
                assert not self.effects[Conclude], "no move starts after the verdict"
                assert move == self.moves, "moves are numbered from 0 on"
                assert len(source) == len(destination) > 0
                self.moves += 1
                self.holds[move] = {Role.PREFILL, Role.DECODE}
                self.started[leg] += zip(unpacked(source), unpacked(destination), strict=True)
            case Conclude(failure=failure):
                assert not over, "one verdict"
                assert self.effects[Conclude] == 1
                self.failure = failure
            case Revoke(moves=moves):
                assert self.effects[Conclude] == 1
                assert set(moves) == set(self.holds), "what is not over is revoked, and nothing else"
            case Release(side=side):
                assert self.effects[Conclude] == 1, "no release before the verdict"
                assert side not in self.released, "a side is released once"
                self.released.append(side)
            case AllMoving():
                assert self.effects[AllMoving] == 1

    def judge(self, ends: Failure | None) -> None:
        """Work out the state from everything that was said."""
        if ends is not None:
            expected = State.FAILED
            assert self.failure is ends, "the cause is kept"
        elif self.said.mismatch:
            expected = State.FAILED
            assert self.failure is not None
            assert self.failure.reason is Reason.REJECTED
        elif self.said.all_in:
            expected = State.MOVING if self.holds else State.SUCCEEDED
        else:
            expected = State.WAITING if self.said.last else State.OPEN
        self.state = expected
        assert self.machine.state is expected
        assert self.effects[Conclude] == int(expected.terminal)
        assert self.effects[StartClock] == int(bool(self.said.last))
        assert self.machine.aux == self.said.aux
        if expected is not State.FAILED:
            assert self.failure is None
            assert self.started == {leg: self.said.pairs(leg) for leg in self.said.legs}
        else:
            for leg, pairs in self.started.items():
                assert pairs == self.said.pairs(leg)[: len(pairs)], "what moved was right"

    @property
    def over(self) -> bool:
        """Nothing more can happen, and that was tried a few times."""
        return self.state.terminal and not self.holds and self.lates > LATES

    def check_releases(self) -> None:
        """A side is released exactly when the verdict is known and no move holds it."""
        self.was_held |= self.state.terminal and bool(self.holds)
        held = {side for holds in self.holds.values() for side in holds}
        expected = {side for side in Role if self.state.terminal and side not in held}
        assert set(self.released) == expected
        assert set(self.machine.held) == set(Role) - expected
        assert set(self.machine.unsettled) == set(self.holds)

    def refused(self, event: Event) -> None:
        """Apply an event that its sender must not send: it is told, and nothing else happens."""
        effects = self.apply(event)
        assert [type(effect) for effect in effects] == [Refuse]

    def let_go(self, move: int, *sides: Role) -> None:
        if move in self.holds:
            self.holds[move] -= set(sides)
            if not self.holds[move]:
                del self.holds[move]

    def fresh_pages(self, count: int) -> list[int]:
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        return pages

    # --- rules: the prefill side ----------------------------------------------------------------

    @goes_on
    @rule(rank=ANY)
    def opened(self, rank: int) -> None:
        rank %= self.said.prefill
        if self.state.terminal:
            self.apply(Opened(rank), late=True)
        elif rank in self.said.last:
            self.refused(Opened(rank))
        else:
            self.said.sent.setdefault(rank, [])
            assert self.apply(Opened(rank)) == []

    @goes_on
    @rule(rank=ANY, count=st.integers(0, 3), last=st.booleans(), exact=st.sampled_from([True] * 7 + [False]))
    def sent(self, rank: int, count: int, *, last: bool, exact: bool) -> None:
        """Mostly as many pages as the room has; now and then any number."""
        rank %= self.said.prefill
        missing = self.total - len(self.said.sent.get(rank, []))
        if exact:
            count = missing if last else min(count, missing)
        pages = self.fresh_pages(max(count, 0))
        event = Sent(rank, packed(*pages), last, aux=bytes([rank, len(pages)]))
        if self.state.terminal:
            self.apply(event, late=True)
        elif rank in self.said.last:
            self.refused(event)
        else:
            self.said.sent.setdefault(rank, []).extend(pages)
            if last:
                self.said.last.append(rank)
                self.said.aux = event.aux if rank == 0 else self.said.aux
            self.apply(event)

    # --- rules: the decode side -----------------------------------------------------------------

    @goes_on
    @rule(rank=ANY, prefix=st.sampled_from([0, 0, 0, 1, 2, 5]), more=st.sampled_from([0] * 9 + [1, 2]))
    def offered(self, rank: int, prefix: int, more: int) -> None:
        """Mostly the room's pages behind a prefix; now and then too many."""
        rank %= self.said.decode
        prefix = min(prefix, self.total)
        pages = self.fresh_pages(self.total - prefix + more)
        event = Offered(rank, packed(*pages), prefix)
        if self.state.terminal:
            self.apply(event, late=True)
        elif rank in self.said.offered:
            self.refused(event)
        else:
            self.said.offered[rank] = (prefix, pages)
            self.apply(event)

    @goes_on
    @rule(rank=ANY)
    def extended(self, rank: int) -> None:
        effects = self.apply(Extended(rank % self.said.decode), late=self.state.terminal)
        running = self.state in {State.WAITING, State.MOVING}
        assert (ExtendClock() in effects) is running

    # --- rules: the coordinator's own -----------------------------------------------------------

    @goes_on
    @rule()
    def paired(self) -> None:
        if self.state.terminal:
            self.apply(Paired(self.pairing), late=True)
        elif self.said.paired:
            with pytest.raises(InvalidTransitionError):
                self.machine.apply(Paired(self.pairing))
            self.check_unchanged()
        else:
            self.said.paired = True
            self.apply(Paired(self.pairing))

    @goes_on
    @rule(sure=st.sampled_from([True] + [False] * 3))
    def inherited(self, *, sure: bool) -> None:
        """From then on it cannot succeed; what a former coordinator left is one more move to hold it."""
        if self.state.terminal:
            self.apply(Inherited(), late=True)
        elif self.state is not State.OPEN:
            with pytest.raises(InvalidTransitionError):
                self.machine.apply(Inherited())
            self.check_unchanged()
        elif sure:
            self.holds[INHERITED] = {Role.PREFILL, Role.DECODE}
            assert self.apply(Inherited()) == []

    @goes_on
    @rule(failure=st.sampled_from(FAILURES), sure=st.sampled_from([True] + [False] * 3))
    def aborted(self, failure: Failure, *, sure: bool) -> None:
        """Not too often, so that other ends are reached as well."""
        if self.state.terminal:
            self.apply(Aborted(failure), late=True)
        elif sure:
            self.apply(Aborted(failure), ends=failure)

    # --- rules: moves ---------------------------------------------------------------------------

    def pick(self, move: int) -> int:
        """A move that is not quiet, if there is one; or any other number, also of none."""
        return sorted(self.holds)[move % len(self.holds)] if self.holds and move % 4 else move % 8

    @goes_on
    @rule(move=ANY)
    def moved(self, move: int) -> None:
        move = self.pick(move)
        late = self.state.terminal or move not in self.holds
        self.let_go(move, Role.PREFILL, Role.DECODE)
        self.apply(Moved(move), late=late)

    @goes_on
    @rule(
        move=ANY,
        failure=st.sampled_from(FAILURES),
        source=st.booleans(),
        destination=st.booleans(),
        sure=st.sampled_from([True] + [False] * 3),
    )
    def move_failed(
        self, move: int, failure: Failure, *, source: bool, destination: bool, sure: bool
    ) -> None:
        move = self.pick(move)
        if not (sure or self.state.terminal or move not in self.holds):
            return
        late = self.state.terminal or move not in self.holds
        if source:
            self.let_go(move, Role.PREFILL)
        if destination:
            self.let_go(move, Role.DECODE)
        event = MoveFailed(move, failure, source_quiet=source, destination_quiet=destination)
        self.apply(event, ends=None if late else failure, late=late)

    @goes_on
    @rule(move=ANY, side=st.sampled_from(Role))
    def quiet(self, move: int, side: Role) -> None:
        move = self.pick(move)
        event = MoveQuiet(move, side)
        if not self.state.terminal:
            with pytest.raises(InvalidTransitionError):
                self.machine.apply(event)
            self.check_unchanged()
            return
        if self.state is State.FAILED:
            self.let_go(move, side)
        self.apply(event, late=self.state is State.SUCCEEDED)

    @precondition(lambda self: not self.state.terminal)
    @rule(choices=st.lists(ANY, min_size=1, max_size=12))
    def everybody_goes_on(self, choices: list[int]) -> None:
        self.go_on(choices)

    def go_on(self, choices: list[int]) -> None:
        """What good ranks and workers do next, in any order, so that many handoffs come to a good end."""
        for choice in choices:
            steps: list[Callable[[], None]] = []
            if not self.said.paired:
                steps.append(self.paired)
            steps += [
                partial(self.offered, rank, choice % 3, 0)
                for rank in range(self.said.decode)
                if rank not in self.said.offered
            ]
            steps += [
                partial(self.sent, rank, 1, last=choice % 2 == 0, exact=True)
                for rank in range(self.said.prefill)
                if rank not in self.said.last
            ]
            steps += [partial(self.moved, move=1 + 4 * number) for number in range(len(self.holds))]
            steps[choice % len(steps)]()
            if self.state.terminal:
                return

    @precondition(lambda self: self.state.terminal)
    @rule(moves=st.lists(ANY, min_size=1, max_size=8))
    def things_calm_down(self, moves: list[int]) -> None:
        for move in moves:
            self.quiet(4 * move + 1, Role.PREFILL if move % 2 else Role.DECODE)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def another_one(self, data: st.DataObject) -> None:
        """The rest of the steps may as well try another handoff."""
        self.finish()
        self.begin(data)

    # --- at all times, and at the end -------------------------------------------------------------

    def check_unchanged(self) -> None:
        self.machine.validate()
        assert self.machine.state is self.state
        self.check_releases()

    @invariant()
    def the_verdict_stays(self) -> None:
        assert self.machine.state is self.state
        assert self.machine.failure is self.failure
        assert self.machine.concluded == int(self.state.terminal)

    @invariant()
    def the_story_is_short_and_ends_in_the_present(self) -> None:
        story = self.machine.story
        assert len(story) <= 3
        assert [step.at_s for step in story] == sorted(step.at_s for step in story)
        assert (story[-1].state if story else State.OPEN) is self.state

    def teardown(self) -> None:
        if hasattr(self, "machine") and self.sound:
            self.finish()

    def finish(self) -> None:
        """However it went: once nothing moves any more, both sides are free, each told once."""
        if not self.state.terminal:
            self.apply(Aborted(FAILURES[0]), ends=FAILURES[0])
        for number, move in enumerate(list(self.holds)):
            for side in sorted(self.holds[move], reverse=bool(number % 2)):
                assert set(self.released) < set(Role)
                self.let_go(move, side)
                self.apply(MoveQuiet(move, side))
        assert sorted(self.released) == sorted(Role)
        assert self.machine.unsettled == ()
        assert self.effects[Conclude] == 1
        assert self.effects[Release] == 2
        if self.state is State.SUCCEEDED:
            for leg in self.said.legs:
                assert self.started[leg] == self.said.pairs(leg)
                prefix, destination = self.said.offered[leg[1]]
                assert len(self.started[leg]) == len(destination) == self.total_of(leg) - prefix
        REACHED[self.state] += 1
        REACHED["held"] += self.was_held

    def total_of(self, leg: Leg) -> int:
        return len(self.said.sent[leg[0]])


# It takes some seconds. But when it fails, the search for a short example takes its time (at most 300 s).
@pytest.mark.timeout(400)
def test_any_order_of_events_has_one_verdict_and_one_release_per_side() -> None:
    REACHED.clear()
    run_state_machine_as_test(AnyOrder, settings=SETTINGS)
    assert REACHED[State.SUCCEEDED] > 10, REACHED
    assert REACHED[State.FAILED] > 10, REACHED
    assert REACHED["held"] > 10, REACHED
