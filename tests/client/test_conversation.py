"""The client's side of the protocol, on a bad network with a clock of its own."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.client import ClientSettings, RankState
from coordinator.client.conversation import BATCH_BYTES, Conversation
from coordinator.errors import ConfigError, QueueFullError, RefusedError
from coordinator.messages import (
    MAX_ITEMS,
    Broadcast,
    Held,
    Hello,
    Memory,
    Open,
    Outcome,
    Refused,
    Resend,
    Send,
    Submit,
    Unreleased,
    Welcome,
    WhoAreYou,
)
from tests.client.world import World


def conversation() -> Conversation:
    return World(Random(0), 1).lines[0].conversation


def welcome(epoch: int = 5, first: int = 1, received: int = 0, **changes: object) -> Welcome:
    fields: dict[str, object] = {"events": [], "stable": 0, "heartbeat_s": 1.0, **changes}
    return Welcome(epoch, "somewhere", first, received=received, **fields)  # type: ignore[arg-type]


def heartbeat(epoch: int = 5, first: int = 1, received: int = 0, *, ready: bool = True) -> Broadcast:
    return Broadcast(epoch, first, 0, [received], [] if ready else [0], [])


def joined() -> Conversation:
    talk = conversation()
    assert isinstance(talk.next_message(0.0), Hello)
    talk.hear(welcome(), 0.0)
    talk.hear_broadcast(heartbeat(), 0.0)
    assert isinstance(talk.next_message(0.0), Submit)
    assert talk.next_message(0.0) is None
    return talk


def say(talk: Conversation, *rooms: int) -> None:
    for room in rooms:
        talk.say(Open(room, 0), 1)


def submitted(talk: Conversation, now_s: float) -> tuple[int, list[int]]:
    message = talk.next_message(now_s)
    assert isinstance(message, Submit)
    return message.first, [item.room for item in message.items]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(20, 400))
def test_nobody_misses_anything_on_a_bad_network(seed: int, ranks: int, steps: int) -> None:
    """Cases C05 and C30: all ranks drain the same, and every room has one verdict, told once."""
    world = World(Random(seed), ranks)
    for _ in range(steps):
        world.step()
    world.settle()
    for line in world.lines:
        line.drain(None)
        assert line.drained == world.log
    told = [event.room for event in world.log if isinstance(event, Outcome)]
    assert sorted(told) == sorted(set[int]().union(*(line.said for line in world.lines)))


def test_a_rank_gives_signs_of_life() -> None:
    talk = joined()
    assert talk.due_s() == pytest.approx(1.0)
    assert talk.next_message(0.99) is None
    assert submitted(talk, 1.0) == (1, [])
    assert talk.due_s() == pytest.approx(2.0)


def test_batches_are_bounded() -> None:
    talk = joined()
    say(talk, *range(1, MAX_ITEMS + 2))
    assert [len(submitted(talk, 0.0)[1]) for _ in range(2)] == [MAX_ITEMS, 1]
    for room in (1, 2, 3):
        talk.say(Send(room, 0, b"", last=False), BATCH_BYTES // 2)
    assert [submitted(talk, 0.0)[1] for _ in range(2)] == [[1, 2], [3]]
    assert talk.next_message(0.0) is None


def test_what_counts_as_drained_was_drained_before_all_that_is_still_to_be_said() -> None:
    """Case C30: also when there is too much for one message, and when it is said again."""
    talk = joined()
    say(talk, *range(1, MAX_ITEMS + 2))
    talk.hear_broadcast(Broadcast(5, 1, 2, [0], [], [Outcome(1, 1), Outcome(2, 1)]), 0.0)
    assert len(talk.drain(None)) == 2
    talk.say(Open(1, 2), 1)

    def applied() -> int:
        message = talk.next_message(0.0)
        assert isinstance(message, Submit)
        return message.applied

    assert [applied(), applied()] == [0, 2]
    talk.hear(Resend(0), 0.0)
    assert [applied(), applied()] == [0, 2]


def test_an_unanswered_hello_is_said_again() -> None:
    talk = conversation()
    assert isinstance(talk.next_message(0.0), Hello)
    assert talk.next_message(0.9) is None
    assert talk.due_s() == pytest.approx(1.0)
    assert isinstance(talk.next_message(1.0), Hello)


def test_hellos_that_nobody_ever_answers_get_a_new_connection() -> None:
    """Case C42."""
    talk = conversation()
    for second in range(11):
        talk.tick(float(second))
        assert isinstance(talk.next_message(float(second)), Hello)
    assert talk.connections == 2


def test_two_hellos_that_are_asked_for_are_not_said_at_once() -> None:
    """Else a rank and a coordinator that does not know it would keep each other busy."""
    talk = joined()
    talk.hear(WhoAreYou(5), 1.0)
    assert isinstance(talk.next_message(1.0), Hello)
    talk.hear(welcome(), 1.0)
    talk.hear(WhoAreYou(5), 1.0)
    assert talk.due_s() == pytest.approx(1.05)
    assert talk.next_message(1.04) is None
    assert isinstance(talk.next_message(1.05), Hello)


def test_a_gap_is_asked_for_once_until_it_is_answered() -> None:
    talk = joined()
    for _ in range(3):
        talk.hear_broadcast(heartbeat(first=4), 0.2)
    hello = talk.next_message(0.2)
    assert isinstance(hello, Hello)
    assert (hello.epoch, hello.acknowledged) == (5, 0)
    talk.hear_broadcast(heartbeat(first=4), 0.3)
    assert talk.next_message(0.3) is None
    talk.hear(welcome(events=[Outcome(1, 1), Outcome(2, 1), Outcome(3, 1)]), 0.4)
    assert talk.standing.state is RankState.READY, "only events were missing"
    assert talk.inbox.have == 3


def test_what_the_coordinator_lacks_is_submitted_again_at_once() -> None:
    talk = joined()
    say(talk, 1, 2, 3)
    assert submitted(talk, 0.0) == (1, [1, 2, 3])
    talk.hear(Resend(1), 0.1)
    assert submitted(talk, 0.1) == (2, [2, 3])
    say(talk, 4)
    assert submitted(talk, 0.1) == (4, [4])
    # The answer to what had been under way behind the gap.
    talk.hear(Resend(1), 0.15)
    assert talk.next_message(0.15) is None
    # That was lost as well.
    talk.hear(Resend(1), 1.1)
    assert submitted(talk, 1.1) == (2, [2, 3, 4])


def test_what_is_never_confirmed_is_submitted_again() -> None:
    talk = joined()
    say(talk, 1, 2)
    assert submitted(talk, 0.0) == (1, [1, 2])
    for second in (1, 2, 3):
        talk.hear_broadcast(heartbeat(received=1), float(second))
        talk.tick(float(second))
        assert submitted(talk, float(second)) == (3, [])
    talk.hear_broadcast(heartbeat(received=1), 4.01)
    assert talk.due_s() <= 4.01
    talk.tick(4.01)
    assert submitted(talk, 4.01) == (2, [2])


def test_silence_means_that_the_coordinator_is_away() -> None:
    talk = joined()
    talk.tick(2.9)
    assert talk.connections == 0
    talk.tick(3.1)
    assert not talk.joined
    assert str(talk.standing.state) == "coordinator_away"
    assert talk.connections == 1, "perhaps only our connection is dead"
    say(talk, 1)
    assert isinstance(talk.next_message(3.1), Hello)
    assert talk.next_message(3.2) is None, "what is said waits"
    talk.hear(welcome(), 4.0)
    assert talk.standing.state is RankState.JOINED
    assert submitted(talk, 4.0) == (1, [1])


def test_a_connection_that_takes_nothing_is_left_alone_until_it_does() -> None:
    talk = joined()
    say(talk, 1)
    assert submitted(talk, 0.0) == (1, [1])
    talk.blocked(0.5)
    assert talk.standing.state is RankState.COORDINATOR_AWAY
    assert talk.next_message(10.0) is None
    assert talk.due_s() == float("inf")
    talk.unblocked()
    assert isinstance(talk.next_message(10.0), Hello)
    talk.hear(welcome(), 10.0)
    assert submitted(talk, 10.0) == (1, [1])


def test_who_hears_the_broadcasts_and_is_not_joined_is_not_ready() -> None:
    """Of two connections only the one for what the rank says is down."""
    talk = joined()
    talk.blocked(0.5)
    talk.hear_broadcast(Broadcast(5, 1, 0, [0], [], [Outcome(9, 1)]), 0.6)
    assert talk.standing.state is RankState.COORDINATOR_AWAY
    assert talk.drain(None) == [Outcome(9, 1)], "what it hears counts all the same"


def test_a_new_coordinator_gets_what_the_old_one_did_not_confirm() -> None:
    talk = joined()
    talk.hear_broadcast(Broadcast(5, 1, 0, [0], [], [Outcome(9, 1)]), 0.0)
    talk.drain(None)
    after = talk.inbox.drained
    for room in (1, 2, 3):
        talk.say(Open(room, after), 1)
    assert submitted(talk, 0.0) == (1, [1, 2, 3])
    talk.hear_broadcast(heartbeat(first=2, received=1), 0.1)
    talk.hear_broadcast(heartbeat(epoch=6), 0.2)
    assert talk.standing.state is RankState.CONNECTING
    hello = talk.next_message(0.2)
    assert isinstance(hello, Hello)
    assert (hello.epoch, hello.acknowledged, hello.confirmed, hello.memory) == (5, 1, 1, None)
    talk.hear(WhoAreYou(6), 0.3)
    hello = talk.next_message(0.3)
    assert isinstance(hello, Hello)
    assert hello.memory == Memory(
        [Outcome(9, 1)], [Held(1, 1, 0), Held(2, 1, 0), Held(3, 1, 0)], [Unreleased(9, 1)]
    )
    talk.hear(welcome(epoch=6, first=2, received=1), 0.3)
    message = talk.next_message(0.3)
    assert isinstance(message, Submit)
    assert message == Submit(6, 2, 1, 1, listening=False, items=[Open(2, 1), Open(3, 1)])
    # What its predecessor had under way means nothing any more.
    talk.hear(welcome(epoch=5), 0.4)
    talk.hear_broadcast(heartbeat(epoch=5, received=3), 0.4)
    assert talk.joined
    assert talk.inbox.epoch == 6
    assert len(talk.outbox) == 2


def test_a_rank_that_was_before_its_group_at_a_new_coordinator_begins_where_that_goes_on() -> None:
    talk = joined()
    talk.hear(welcome(first=4), 0.1)
    assert talk.joined
    talk.hear_broadcast(Broadcast(5, 4, 4, [0], [], [Outcome(9, 1)]), 0.2)
    assert talk.drain(None) == [Outcome(9, 1)]
    assert (talk.inbox.base, talk.inbox.drained) == (3, 4)


@pytest.mark.parametrize("past", ["said", "heard", "confirmed"])
def test_events_that_are_not_kept_any_more_end_it(past: str) -> None:
    talk = joined()
    if past == "heard":
        talk.hear_broadcast(Broadcast(5, 1, 1, [0], [], [Outcome(9, 1)]), 0.0)
        assert talk.drain(None) == [Outcome(9, 1)]
    else:
        say(talk, 1)
    if past == "confirmed":
        assert submitted(talk, 0.0) == (1, [1])
        talk.hear_broadcast(heartbeat(received=1), 0.0)
    talk.hear(welcome(first=4), 0.1)
    assert talk.standing.state is RankState.REFUSED
    assert talk.news
    with pytest.raises(RefusedError, match="goes on with event 4"):
        say(talk, 1)
    with pytest.raises(RefusedError, match="restart this engine"):
        talk.drain(None)
    assert talk.next_message(9.0) is None


def test_the_first_fault_stays() -> None:
    talk = joined()
    talk.hear(Refused("taken", "rank 0 is taken", fatal=True), 0.1)
    talk.hear(Refused("other", "something else", fatal=True), 0.1)
    talk.hear(welcome(epoch=9), 0.1)
    with pytest.raises(RefusedError, match="rank 0 is taken"):
        talk.standing.check()
    assert talk.standing.explain() == "the coordinator at nowhere refuses g/0: rank 0 is taken"


def test_a_full_queue_says_why() -> None:
    talk = conversation()
    with pytest.raises(QueueFullError, match="65536 calls with 65536 bytes wait"):
        say(talk, *range(1, 65538))
    talk.hear(welcome(), 0.0)
    talk.hear(WhoAreYou(6), 0.0)
    with pytest.raises(QueueFullError, match="has accepted this rank yet"):
        say(talk, 1)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings(queue_items=0, away_after_s=-1, hello_retry_s=float("nan"))
    assert caught.value.problems == [
        "queue_items: is 0, must be positive",
        "hello_retry_s: is nan, must be positive",
        "away_after_s: is -1, must be positive",
    ]
