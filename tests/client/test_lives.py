"""A coordinator that is lost: the same rooms fail on all ranks in the same step, exactly once."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.messages import Outcome
from coordinator.reasons import Reason
from tests.client.lockstep import LOST_S, World

if TYPE_CHECKING:
    from coordinator.messages import Event

SEEDS = st.integers(0, 2**32)


def absence(random: Random) -> float:
    """How long the coordinator stays away: often for about as long as it may."""
    return random.choice([1.0, 20.0, LOST_S - 5, LOST_S, LOST_S + 5, random.uniform(0, 200)])


def live(world: World, turns: int) -> None:
    """Let things happen."""
    random = world.random
    for _ in range(turns):
        match random.choices(["turn", "step", "away", "cut"], [30, 20, 2, 1])[0]:
            case "turn":
                world.turn()
            case "step":
                # Rank 0 may read tokens before it has drained the former ones.
                world.step(random.choice([1, 1, 1, 2, 3]))
            case "away":
                world.leave()
                world.away(absence(random))
                world.return_(same=random.random() < 0.5)
                world.calm()
            case "cut":
                world.lines[0].cut = True
                world.away(absence(random))
                world.lines[0].cut = False
                world.calm()


@settings(max_examples=200)
@given(SEEDS, st.integers(1, 4), st.integers(5, 60))
def test_all_ranks_apply_the_same_whatever_becomes_of_the_coordinator(
    seed: int, ranks: int, turns: int
) -> None:
    """Case C24: no room is without an outcome, none has two, and all pages come back."""
    world = World(Random(seed), ranks)
    live(world, turns)
    world.settle()


def test_the_random_test_meets_what_it_is_about() -> None:
    lost = failed = 0
    for seed in range(60):
        world = World(Random(seed), 2)
        live(world, 40)
        lost += world.losses
        failed += sum(is_lost(event) for event in world.lines[0].engine.applied)
    assert lost > 30
    assert failed > 100


def is_lost(event: Event) -> bool:
    """Whether it is the outcome of a room whose coordinator was lost."""
    failure = event.failure if isinstance(event, Outcome) else None
    return failure is not None and failure.reason is Reason.COORDINATOR_LOST
