"""What must hold when a storm is over."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from coordinator.messages import Outcome, Role
from coordinator.rooms import SIDE_DATA_LOST
from tests.faults.chaos.storm import PAIRS

if TYPE_CHECKING:
    from coordinator.messages import Event
    from tests.faults.chaos.engines import Engine
    from tests.faults.chaos.storm import Storm


def judge(storm: Storm) -> None:
    """Assert everything."""
    for engine in storm.engines.values():
        _same_on_every_rank(storm, engine)
    for size in PAIRS:
        _same_on_both_sides(storm, size)
    assert storm.stage is not None
    storm.stage.check()


def _same_on_every_rank(storm: Storm, engine: Engine) -> None:
    """One list for all: none twice, none missing, a rank that joined late from its first one on."""
    whole: dict[int, Event] = {}
    lives = [rank for rank in storm.ranks if rank.hello.group == engine.name]
    for rank in lives:
        for number, event in rank.applied.items():
            assert whole.setdefault(number, event) == event, f"{rank.name} differs at event {number}"
    head = max(whole, default=0)
    assert sorted(whole) == list(range(1, head + 1)), f"{engine.name} lacks events"
    for rank in lives:
        numbers = list(rank.applied)
        if numbers:
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"{rank.name} lacks events"
        if rank.alive:
            inbox = rank.conversation.inbox
            assert (inbox.base + 1, inbox.drained) == (numbers[0] if numbers else head + 1, head), rank.name
    events = [whole[number] for number in range(1, head + 1)]
    told = [(event.room, event.attempt) for event in events if isinstance(event, Outcome)]
    assert not _twice(told), f"{engine.name} has verdicts twice: {_twice(told)}"
    released = [(event.room, event.attempt) for event in events if not isinstance(event, Outcome)]
    assert not _twice(released), f"{engine.name} has releases twice: {_twice(released)}"
    assert set(released) == set(told), f"{engine.name} lacks releases: {set(told) ^ set(released)}"


def _twice(keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [key for key, count in Counter(keys).items() if count > 1]


def _same_on_both_sides(storm: Storm, size: int) -> None:
    """Every use has its verdict on both sides, and a success brings what was sent for that use."""
    prefill, decode = (storm.engines[f"{role.value}-{size}"] for role in Role)
    for use in storm.uses[size]:
        key = (use.room, use.generation)
        sent, got = prefill.outcomes.get(key), decode.outcomes.get(key)
        assert sent is not None and got is not None, f"{use} has no verdict"  # noqa: PT018 - both are shown
        if got.failure is None:
            assert got.aux == use.aux, f"{use} got the side data {got.aux!r}"
        lost = got.failure is not None and got.failure.message == SIDE_DATA_LOST
        assert sent.succeeded == (got.succeeded or lost), f"{use}: {sent} and {got}"
