"""How rooms ended: which of them are remembered, and which are forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator import endings
from coordinator.endings import Ended, Endings

if TYPE_CHECKING:
    from collections.abc import Iterable


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Endings:
    """Endings that remember three rooms."""
    monkeypatch.setattr(endings, "REMEMBERED", 3)
    return Endings()


def end(known: Endings, *rooms: int) -> None:
    for room in rooms:
        known.remember(room, Ended(known.next_attempt(room), None, at_s=0.0))


def attempts(known: Endings, rooms: Iterable[int]) -> list[int]:
    """The last attempt of each of these rooms, 0 for one that is forgotten."""
    return [known.next_attempt(room) - 1 for room in rooms]


def test_the_room_that_ended_longest_ago_is_forgotten(three: Endings) -> None:
    end(three, 1, 2, 3, 1, 4)
    assert attempts(three, range(1, 5)) == [2, 0, 1, 1]


def test_a_room_is_remembered_as_long_as_pages_of_any_of_its_attempts_are_held(three: Endings) -> None:
    for _ in range(2):
        end(three, 1)
        three.hold(1)
    end(three, *range(2, 20))
    three.let_go(1)
    end(three, *range(20, 40))
    assert attempts(three, [1]) == [2]
    three.let_go(1)
    end(three, *range(40, 60))
    assert attempts(three, [1]) == [0]
    assert len(three._ended) == 3, "no more than it may be"
