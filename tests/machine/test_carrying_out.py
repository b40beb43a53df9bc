"""A handoff carries out its machine's effects in their order, also when one of them has a consequence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator.config import HandoffBounds
from coordinator.events import Aborted, Moved, MoveFailed, MoveQuiet, Offered, Paired, Sent
from coordinator.handoff import Handoff
from coordinator.messages import Role
from coordinator.reasons import Failure, Reason
from tests.support.waiting import eventually_async

from .support import PAIRS, packed

if TYPE_CHECKING:
    from coordinator.events import Event, Leg, StartMove

DOWN = Failure(Reason.CONNECT, "", "the way to this rank is down")


class Notebook:
    """A desk that writes down what it is asked for. Moves on the legs that are ``down`` fail at once."""

    def __init__(self, *down: Leg) -> None:
        self.bounds = HandoffBounds()
        self.notes: list[str] = []
        self._down = down

    def start_move(self, handoff: Handoff, move: StartMove) -> None:
        self.notes.append(f"start {move.move}")
        if move.leg in self._down:
            handoff.apply(MoveFailed(move.move, DOWN, source_quiet=True, destination_quiet=True))

    def revoke(self, handoff: Handoff, moves: tuple[int, ...]) -> None:
        assert handoff.machine.state.terminal
        self.notes.append(f"revoke {moves}")

    def concluded(self, handoff: Handoff) -> None:
        failure = handoff.machine.failure
        self.notes.append(f"concluded {failure.reason if failure else 'succeeded'}")

    def released(self, handoff: Handoff, side: Role) -> None:
        assert side not in handoff.machine.held
        self.notes.append(f"released {side}")

    def late(self, handoff: Handoff, event: Event) -> None:
        assert handoff.machine.state.terminal
        self.notes.append(f"late {type(event).__name__}")

    def prefill_completed(self, handoff: Handoff) -> None:
        """Not looked at."""

    def all_moving(self, handoff: Handoff) -> None:
        """Not looked at."""

    async def make_quiet(self, handoff: Handoff) -> None:
        self.notes.append(f"make quiet {handoff.machine.unsettled}")

    def closed(self, handoff: Handoff) -> None:
        assert not handoff.machine.held
        self.notes.append("closed")

    def broken(self, handoff: Handoff, error: Exception) -> None:
        raise AssertionError(handoff.room) from error


BOTH = ["released prefill", "released decode"]
#: Both decode ranks wait for one page; prefill rank 0 has sent one.
SPOKEN = (Offered(0, packed(20), 0), Offered(1, packed(22), 0), Sent(0, packed(10), last=False))


async def carried_out(desk: Notebook, *events: Event) -> list[str]:
    handoff = Handoff(7, 1, desk)
    for event in events:
        handoff.apply(event)
    await eventually_async(lambda: desk.notes[-1] == "closed")
    return desk.notes[:-1]


async def test_a_handoff_that_goes_well() -> None:
    last: list[Event] = [Sent(0, b"", last=True), Sent(1, packed(12), last=True), Moved(0), Moved(1)]
    notes = await carried_out(Notebook(), *SPOKEN, Paired(PAIRS), *last)
    assert notes == ["start 0", "start 1", "concluded succeeded", *BOTH]


async def test_nothing_starts_after_a_move_that_could_not() -> None:
    """Case C06: two moves become due at once, and the first cannot even be posted."""
    second = Sent(1, packed(12), last=False)
    notes = await carried_out(Notebook((0, 0)), *SPOKEN, second, Paired(PAIRS))
    assert notes == ["start 0", "concluded connect", "revoke (1,)", *BOTH]


@pytest.mark.parametrize("down", [(), ((0, 0),)], ids=["all ways are up", "a way is down"])
async def test_the_verdict_is_told_before_the_release(down: tuple[Leg, ...]) -> None:
    """One leg could start, the other one has too many pages: both in one step."""
    second = Sent(1, packed(12, 13), last=False)
    notes = await carried_out(Notebook(*down), *SPOKEN, second, Paired(PAIRS))
    assert notes == ["concluded rejected", "revoke (0,)", *BOTH]


async def test_what_is_to_be_sent_goes_out_before_the_task_runs() -> None:
    """The task has only a clock to start, and a worker waits."""
    clocks = []

    class Sender(Notebook):
        def start_move(self, handoff: Handoff, move: StartMove) -> None:
            super().start_move(handoff, move)
            asyncio.get_running_loop().call_soon(lambda: clocks.append(handoff._clock))

    desk = Sender()
    handoff = Handoff(7, 1, desk)
    for event in (*SPOKEN[:2], Paired(PAIRS)):
        handoff.apply(event)
    await asyncio.sleep(0)
    handoff.apply(Sent(0, packed(10), last=True))
    await eventually_async(lambda: handoff._clock is not None)
    assert clocks == [None]
    handoff.apply(Aborted(DOWN))
    for side in Role:
        handoff.apply(MoveQuiet(0, side))
    await eventually_async(lambda: desk.notes[-1] == "closed")


async def test_a_refusal_is_for_the_sender_alone() -> None:
    desk = Notebook()
    handoff = Handoff(7, 1, desk)
    assert handoff.apply(SPOKEN[0]) is None
    refusal = handoff.apply(SPOKEN[0])
    assert refusal is not None
    assert refusal.message == "offered twice"
    assert desk.notes == []
    handoff.apply(Aborted(DOWN))
    await eventually_async(lambda: desk.notes == ["concluded connect", *BOTH, "closed"])
