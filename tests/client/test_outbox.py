"""The outbox: whatever is lost on the way, every item arrives once and in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.client.outbox import Entry, Outbox
from coordinator.messages import Item, Open


def entry(number: int) -> Entry:
    return Entry(Open(number, 0), number)


def filled(count: int) -> Outbox:
    outbox = Outbox()
    for number in range(1, count + 1):
        outbox.put(*entry(number))
    return outbox


def rooms(items: list[Item]) -> list[int]:
    return [item.room for item in items]


def test_a_batch_ends_at_either_bound_but_is_never_empty() -> None:
    outbox = filled(6)
    assert rooms(outbox.take(2, 1000)) == [1, 2]
    assert rooms(outbox.take(9, 7)) == [3, 4]
    assert rooms(outbox.take(9, 1)) == [5]
    assert rooms(outbox.take(9, 1000)) == [6]
    assert outbox.take(9, 1000) == []


def test_what_is_confirmed_is_forgotten() -> None:
    outbox = filled(4)
    outbox.take(3, 1000)
    assert rooms(outbox.confirm(2)) == [1, 2]
    assert (len(outbox), outbox.size_bytes, outbox.confirmed, outbox.sent) == (2, 7, 2, 3)
    assert outbox.confirm(1) == []
    assert outbox.confirm(4) == [], "it was never handed out"
    assert len(outbox) == 2


def test_nothing_is_confirmed_before_anything_was_handed_out() -> None:
    outbox = filled(2)
    assert outbox.confirm(1) == []
    assert (len(outbox), outbox.confirmed) == (2, 0)


def test_after_a_rewind_confirmations_of_the_first_try_still_count() -> None:
    outbox = filled(4)
    outbox.take(4, 1000)
    outbox.rewind()
    assert (outbox.unsent, outbox.sent) == (4, 0)
    assert rooms(outbox.confirm(3)) == [1, 2, 3]
    assert rooms(outbox.take(9, 1000)) == [4]
    assert outbox.sent == 4


def test_a_new_coordinator_counts_anew() -> None:
    outbox = filled(4)
    outbox.take(4, 1000)
    outbox.confirm(2)
    outbox.rebase(0)
    assert outbox.confirm(2) == [], "that was said of other items"
    assert rooms(outbox.take(9, 1000)) == [3, 4]
    assert outbox.sent == 2
    assert rooms(outbox.confirm(2)) == [3, 4]
    assert len(outbox) == 0


class LossySubmissions(RuleBasedStateMachine):
    """A coordinator that applies what joins on, a network that loses, and an outbox between."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.said = 0
        self.heard: list[int] = []
        self.under_way: list[tuple[int, list[Item]]] = []

    @rule()
    def say(self) -> None:
        self.said += 1
        self.outbox.put(*entry(self.said))

    @rule(max_items=st.integers(1, 4))
    def submit(self, max_items: int) -> None:
        first = self.outbox.sent + 1
        self.under_way.append((first, self.outbox.take(max_items, 1 << 20)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:  # noqa: FBT001 - hypothesis draws it
        index = data.draw(st.integers(0, len(self.under_way) - 1))
        first, items = self.under_way[index] if keep else self.under_way.pop(index)
        if first <= len(self.heard) + 1:
            self.heard += rooms(items[len(self.heard) + 1 - first :])

    @precondition(lambda self: self.under_way)
    @rule()
    def lose(self) -> None:
        self.under_way.pop(0)

    @rule()
    def confirm(self) -> None:
        self.outbox.confirm(len(self.heard))

    @rule()
    def rewind(self) -> None:
        self.outbox.rewind()

    @invariant()
    def every_item_is_heard_or_kept_and_none_twice(self) -> None:
        assert self.heard == list(range(1, len(self.heard) + 1))
        assert self.outbox.confirmed <= len(self.heard)
        assert self.outbox.confirmed + len(self.outbox) == self.said
        assert self.outbox.size_bytes == sum(range(self.outbox.confirmed + 1, self.said + 1))

    def teardown(self) -> None:
        self.outbox.confirm(len(self.heard))
        self.outbox.rewind()
        self.heard += rooms(self.outbox.take(1 << 20, 1 << 40))
        assert self.heard == list(range(1, self.said + 1))


TestLossySubmissions = LossySubmissions.TestCase
TestLossySubmissions.settings = settings(max_examples=50, stateful_step_count=40)


@given(st.lists(st.integers(-3, 30), max_size=30))
def test_no_number_is_too_strange_to_be_told(numbers: list[int]) -> None:
    outbox = filled(10)
    outbox.take(6, 1000)
    for number in numbers:
        outbox.confirm(number)
        assert outbox.confirmed + len(outbox) == 10
