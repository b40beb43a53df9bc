"""The same fault has the same verdict on NIXL and on Mooncake, through the whole service.

The faults are those of the backends' contract suite (``tests/backends/test_contract.py``), as far as a
coordinator and its clients let them come to a backend at all; what its engine and its errors are then,
``tests/backends/test_same_reason.py`` says.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import TYPE_CHECKING, Final

import pytest

from coordinator.messages import Role
from tests.faults.native.world import (
    BACKENDS,
    PATIENCE_S,
    cancel,
    ends,
    hand_over,
    running,
    say,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.benches.support.deployment import RankHandle, Tables
    from tests.faults.native.world import World

#: A handoff that was given up is fenced soon, long before its peer counts as lost.
TABLES: Final[Tables] = {"release": {"settle_s": 0.3}}
#: Short, for the test waits for them; long enough for a busy host, on which all stands still for a moment.
LOST_S: Final = 4.0
CONNECT_S: Final = 8.0


class Stage:
    """A prefill and a decode rank, between which something goes wrong again and again."""

    def __init__(self, world: World) -> None:
        """Start them, and see that they work."""
        self.world = world
        self.rooms = count(1)
        self.prefill = world.start(Role.PREFILL, "prefill")
        self.decode = world.start(Role.DECODE, "decode")
        assert self.works() == "succeeded"

    def works(self) -> str:
        """Hand over a room, with nothing in its way; the reason."""
        return hand_over(self.prefill, self.decode, next(self.rooms))

    def stuck(self, prefill: RankHandle | None = None, decode: RankHandle | None = None) -> int:
        """Begin a room that hangs in the middle of its transfer, because decode is stopped."""
        prefill, decode = prefill or self.prefill, decode or self.decode
        room = next(self.rooms)
        say(decode, room)
        decode.child.stop()
        say(prefill, room)
        self.world.await_moving(room)
        return room

    def reason(self, rank: RankHandle, room: int) -> str:
        """The reason that a rank hears."""
        (end,) = ends(rank, room)
        return end.reason


def stopped_and_continued(stage: Stage) -> str:
    """Cases C09 and C26 are elsewhere; here it takes less than a peer may be silent."""
    room = stage.stuck()
    stage.decode.child.cont()
    return stage.reason(stage.prefill, room)


def stopped_for_good(stage: Stage) -> str:
    """Case C11. It is served over a new link afterwards."""
    connects = len(stage.world.logged("peer.connected"))
    reason = stage.reason(stage.prefill, stage.stuck())
    stage.decode.child.cont()
    assert stage.works() == "succeeded"
    eventually(lambda: len(stage.world.logged("peer.connected")) == connects + 1, PATIENCE_S)
    return reason


def stopped_at_the_first_contact(stage: Stage) -> str:
    """Of another engine's worker."""
    room = next(stage.rooms)
    say(stage.decode, room)
    stage.decode.child.stop()
    other = stage.world.start(Role.PREFILL, "other")
    say(other, room)
    reason = stage.reason(other, room)
    stage.decode.child.cont()
    return reason


def dead_in_the_middle(stage: Stage) -> str:
    """Case C10."""
    room = stage.stuck()
    stage.decode.kill()
    reason = stage.reason(stage.prefill, room)
    stage.decode = stage.world.start(Role.DECODE, "decode")
    return reason


def dead_before(stage: Stage) -> str:
    """The link to it is open, and nothing was moving."""
    room = next(stage.rooms)
    say(stage.decode, room)
    say(stage.prefill, room, pages=0, last=False)
    stage.decode.kill()
    say(stage.prefill, room)
    reason = stage.reason(stage.prefill, room)
    stage.decode = stage.world.start(Role.DECODE, "decode")
    return reason


def returned(stage: Stage) -> str:
    """Case C07: after the deaths above, in its place."""
    return stage.works()


def fenced_in_the_middle(stage: Stage) -> str:
    """What a room is told that was on the link of one that was given up: nothing else made that quiet."""
    rooms = given_up, bystander = next(stage.rooms), next(stage.rooms)
    connects = len(stage.world.logged("peer.connected"))
    say(stage.decode, *rooms)
    stage.decode.child.stop()
    say(stage.prefill, *rooms)
    stage.world.await_moving(*rooms)
    cancel(stage.prefill, given_up)
    assert stage.reason(stage.prefill, given_up) == "cancelled_by_prefill"
    reason = stage.reason(stage.prefill, bystander)
    stage.decode.child.cont()
    # What is begun before the link is gone goes with it.
    eventually(lambda: len(stage.world.logged("peer.connected")) > connects, PATIENCE_S)
    return reason


def after_the_fence(stage: Stage) -> str:
    """Case C17: over a new link."""
    return stage.works()


def more_than_may_be_outstanding(stage: Stage) -> str:
    """A lane never asks its engine for more than that has declared."""
    rooms = [next(stage.rooms) for _ in range(100)]
    say(stage.decode, *rooms, pages=1)
    stage.decode.child.stop()
    say(stage.prefill, *rooms, pages=1)
    stage.world.await_moving(*rooms)
    stage.decode.child.cont()
    (reason,) = {end.reason for end in ends(stage.prefill, *rooms)}
    return reason


def no_blocks(stage: Stage) -> str:
    """Decode has all of the prompt already."""
    return hand_over(stage.prefill, stage.decode, next(stage.rooms), pages=0)


def block_lists_that_do_not_match(stage: Stage) -> str:
    """Refused before a backend hears of it, as are pages outside of a pool."""
    room = next(stage.rooms)
    say(stage.decode, room, pages=3)
    say(stage.prefill, room, pages=2)
    return stage.reason(stage.prefill, room)


def crooked(how: str) -> Callable[[Stage], str]:
    """A decode rank with an endpoint that is not what it should be."""

    def fault(stage: Stage) -> str:
        decode = stage.world.start(Role.DECODE, f"straight-{next(stage.rooms)}")
        stage.world.pose(decode, f"crooked-{next(stage.rooms)}", how)
        room = next(stage.rooms)
        say(decode, room)
        say(stage.prefill, room)
        reason = stage.reason(stage.prefill, room)
        assert stage.works() == "succeeded", "to others nothing has happened"
        return reason

    return fault


def worker_dead_in_the_middle(stage: Stage) -> str:
    """Case C08: the engine ends with everything that it has."""
    room = stage.stuck()
    os.kill(stage.world.worker_of(stage.prefill).pid, signal.SIGKILL)
    reason = stage.reason(stage.prefill, room)
    stage.decode.child.cont()
    assert stage.works() == "succeeded"
    return reason


def prefill_dead_in_the_middle(stage: Stage) -> str:
    """Its worker closes its engine."""
    room = stage.stuck()
    lost = len(stage.world.logged("rank.lost"))
    stage.prefill.kill()
    # Else all may have arrived before the death is seen, and then it succeeds.
    eventually(lambda: len(stage.world.logged("rank.lost")) > lost, PATIENCE_S, "its death is seen")
    stage.decode.child.cont()
    return stage.reason(stage.decode, room)


FAULTS: Final[dict[str, tuple[Callable[[Stage], str], str]]] = {
    "decode stopped and continued": (stopped_and_continued, "succeeded"),
    "decode stopped for good, in the middle": (stopped_for_good, "transport"),
    "decode stopped, at the first contact": (stopped_at_the_first_contact, "connect"),
    "fenced in the middle": (fenced_in_the_middle, "transport"),
    "after the fence": (after_the_fence, "succeeded"),
    "more than may be outstanding": (more_than_may_be_outstanding, "succeeded"),
    "no blocks": (no_blocks, "succeeded"),
    "block lists that do not match": (block_lists_that_do_not_match, "rejected"),
    "an endpoint of nothing": (crooked("nonsense"), "connect"),
    "a damaged endpoint": (crooked("cut short"), "connect"),
    "an endpoint that is closed": (crooked("closed"), "connect"),
    "memory that the peer did not register": (crooked("half out of what is registered"), "transport"),
    "decode dead, in the middle": (dead_in_the_middle, "peer_lost"),
    "decode dead, before": (dead_before, "peer_lost"),
    "decode restarted": (returned, "succeeded"),
    "the worker dead, in the middle": (worker_dead_in_the_middle, "transport"),
    "prefill dead, in the middle": (prefill_dead_in_the_middle, "rank_lost"),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_fault_has_the_same_reason(backend: str) -> None:
    """Cases C07, C08, C10, C11, C15, C17: one after the other, and the peer is served again in between."""
    with running(backend, TABLES, lost_s=LOST_S, connect_s=CONNECT_S) as world:
        stage = Stage(world)
        reasons = {name: fault(stage) for name, (fault, _) in FAULTS.items()}

    assert reasons == {name: reason for name, (_, reason) in FAULTS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_that_the_engine_refuses_are_told(backend: str) -> None:
    """No worker can run with them, and a handoff does not wait for one."""
    with running(backend, {f"backend.options.{backend}": {"no_such_option": 1}}, 2, 2) as world:
        decode = world.start(Role.DECODE, "decode")
        prefill = world.start(Role.PREFILL, "prefill", works=False)
        (death,) = eventually(lambda: world.logged("worker.died"), PATIENCE_S)
        assert not death["restarts"]
        assert hand_over(prefill, decode, 1) == "internal"
