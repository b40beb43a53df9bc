"""The page allocator: never a page twice, none lost, the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.sim.allocator import PageAllocator
from coordinator.sim.errors import AllocationError

PAGES = 24


class Allocations(RuleBasedStateMachine):
    """Random takes and returns, on two allocators that must stay alike."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = (PageAllocator(PAGES), PageAllocator(PAGES))
        self.held: dict[int, set[int]] = {}
        self.next_owner = 0

    @rule(count=st.integers(1, PAGES))
    def take(self, count: int) -> None:
        first, second = (allocator.take(self.next_owner, count) for allocator in self.ranks)
        free = PAGES - sum(map(len, self.held.values()))
        if count > free:
            assert first is None
            assert second is None
            return
        assert first is not None
        assert second is not None
        assert first.dtype == np.int32
        assert first.tolist() == second.tolist()
        self.held[self.next_owner] = set(first.tolist())
        assert len(self.held[self.next_owner]) == count
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[owner]
        for allocator in self.ranks:
            allocator.give_back(owner)

    @invariant()
    def each_page_has_one_place(self) -> None:
        pages = [page for held in self.held.values() for page in held]
        assert len(pages) == len(set(pages))
        assert set(pages) <= set(range(PAGES))
        assert self.ranks[0].free_pages == PAGES - len(pages)
        assert set(self.ranks[0].owners) == set(self.held)

    @invariant()
    def ranks_are_alike(self) -> None:
        assert self.ranks[0].digest() == self.ranks[1].digest()


Allocations.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestAllocations = Allocations.TestCase


def test_the_page_given_back_last_is_handed_out_first() -> None:
    allocator = PageAllocator(8)
    allocator.take("a", 3)
    second = allocator.take("b", 2)
    assert second is not None
    allocator.give_back("b")
    third = allocator.take("c", 2)
    assert third is not None
    assert set(third.tolist()) == set(second.tolist())


def test_the_digest_tells_states_apart() -> None:
    def after(*calls: tuple[str, int]) -> bytes:
        allocator = PageAllocator(8)
        for owner, count in calls:
            if count:
                allocator.take(owner, count)
            else:
                allocator.give_back(owner)
        return allocator.digest()

    digests = [
        after(),
        after(("a", 1)),
        after(("b", 1)),
        after(("a", 2)),
        after(("a", 2), ("b", 2), ("a", 0)),
        after(("a", 2), ("b", 2), ("b", 0)),
        # Everything is free again, but the order in which it will be handed out differs.
        after(("a", 2), ("b", 2), ("a", 0), ("b", 0)),
    ]
    assert len(set(digests)) == len(digests)


def test_wrong_use_is_an_error_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.take("a", 2)
    before = allocator.digest()
    for owner, count in (("a", 1), ("b", 5), ("b", 0)):
        with pytest.raises(AllocationError):
            allocator.take(owner, count)
    with pytest.raises(AllocationError):
        allocator.give_back("b")
    assert allocator.digest() == before
    with pytest.raises(AllocationError, match="at least 1"):
        PageAllocator(0)
