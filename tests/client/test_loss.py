"""What one rank does when its coordinator is lost, step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest

from coordinator.client import ClientSettings, RankState
from coordinator.client.inbox import Head
from coordinator.client.lives import QUIET_HOLD_S, Lives
from coordinator.client.token import Token
from coordinator.errors import RefusedError
from coordinator.messages import (
    Broadcast,
    Event,
    Hello,
    Open,
    Outcome,
    Refused,
    Released,
    Submit,
    Welcome,
)
from coordinator.reasons import Failure, Fault, Reason
from tests.client.lockstep import World

EPOCH = 5
LOST = Failure(Reason.COORDINATOR_LOST, "", "the coordinator at nowhere was not there for 60 s")
SETTINGS = replace(ClientSettings(), away_after_s=3.0)


def welcome(first: int = 1, epoch: int = EPOCH) -> Welcome:
    return Welcome(epoch, "somewhere", first, [], 0, 0, 1.0)


def rank(number: int = 0, size: int = 2) -> Lives:
    """Join a rank at 0 s; nothing more is heard."""
    first = World(Random(0), size).lines[0].lives.conversation.hello
    hello = msgspec.structs.replace(first, rank=number)
    lives = Lives(hello, "nowhere", SETTINGS, 0.0)
    assert isinstance(lives.next_message(0.0), Hello)
    lives.hear(welcome(), 0.0)
    publish(lives, 0)
    return lives


def publish(lives: Lives, stable: int, *events: Event, now_s: float = 0.0) -> None:
    """Let the rank hear of events, of which the first ``stable`` are with all ranks."""
    first = lives.inbox.have + 1
    lives.hear_broadcast(Broadcast(EPOCH, first, stable, [0, 0], [], list(events)), now_s)


def say(lives: Lives, *rooms: int) -> None:
    for room in rooms:
        lives.say(Open(room, lives.inbox.drained), 1, lives.inbox)


def tick(*ranks: Lives, until_s: float) -> None:
    """Let time pass for ranks that hear nothing."""
    for lives in ranks:
        for half_second in range(int(until_s * 2) + 1):
            lives.tick(min(half_second / 2, until_s))


def step(*ranks: Lives, now_s: float = 61.0) -> list[list[Event]]:
    """Drain through the first one's token."""
    token = Token.unpack(ranks[0].head())
    assert all(lives.reaches(token) for lives in ranks)
    return [lives.drain(token, now_s) for lives in ranks]


def failed(*attempts: tuple[int, int]) -> list[Event]:
    return [Outcome(room, attempt, LOST) for room, attempt in attempts]


def judged(lives: Lives) -> bool:
    return lives.judged


def lost(lives: Lives, *rooms: int) -> Lives:
    """Have the rank lose its coordinator with rooms in flight."""
    say(lives, *rooms)
    tick(lives, until_s=61.0)
    assert lives.drain(Token(Head(EPOCH, 0), lost=True), 61.0) == failed(
        *((room, 1) for room in sorted(rooms))
    )
    return lives


# --- the judgement ---------------------------------------------------------------------------


def test_it_takes_coordinator_lost_s() -> None:
    """From the last moment in which the rank was joined: 3 s of silence are not counted."""
    lives = rank()
    tick(lives, until_s=59.0)
    assert not judged(lives)
    assert lives.conversation.standing.state is RankState.COORDINATOR_AWAY
    assert "is away; its return is awaited for 60 s" in lives.conversation.standing.explain()
    tick(lives, until_s=64.0)
    assert judged(lives)
    assert lives.flagged
    assert lives.conversation.news, "an engine that sleeps is woken"


def test_the_thread_wakes_for_it() -> None:
    lives = rank()
    tick(lives, until_s=4.0)
    lives.conversation.blocked(4.0)
    assert lives.due_s() == pytest.approx(lives._alone_since_s + 60.0)
    lives.tick(64.0)
    assert judged(lives)
    assert lives.due_s() == float("inf"), "it is judged once"


def test_a_coordinator_that_returns_just_before_is_not_lost() -> None:
    lives = rank()
    say(lives, 7)
    tick(lives, until_s=59.0)
    lives.hear(welcome(), 59.5)
    tick(lives, until_s=60.0)
    assert not judged(lives)
    assert step(lives) == [[]]
    assert lives.conversation.joined


def test_one_that_returns_before_the_engine_has_asked_is_not_lost_either() -> None:
    lives = rank()
    say(lives, 7)
    tick(lives, until_s=70.0)
    assert judged(lives)
    lives.hear(welcome(), 70.0)
    assert not judged(lives)
    assert not lives.flagged
    assert not Token.unpack(lives.head()).lost


def test_once_the_engine_has_asked_it_is_a_fact() -> None:
    """Another rank may have failed its rooms by now."""
    lives = rank()
    say(lives, 7)
    tick(lives, until_s=70.0)
    token = lives.head()
    assert Token.unpack(token).lost
    lives.hear(welcome(), 70.0)
    publish(lives, 2, Outcome(7, 1), Released(7, 1), now_s=70.0)
    assert lives.next_message(70.0) is None
    assert lives.due_s() == float("inf")
    lives.tick(71.0)
    assert lives.head() == token
    assert step(lives, now_s=71.0) == [failed((7, 1))]


def test_a_rank_that_is_refused_for_good_has_lost_nothing() -> None:
    lives = rank()
    say(lives, 7)
    lives.hear(Refused("taken", "taken", fatal=True), 1.0)
    tick(lives, until_s=100.0)
    assert not judged(lives)
    with pytest.raises(RefusedError):
        lives.drain(None, 100.0)


# --- what it means ---------------------------------------------------------------------------


def test_all_ranks_fail_the_same_whatever_they_have() -> None:
    """One has heard more than the others, one is joined and well."""
    first, second, third = rank(0), rank(1), rank(2)
    for lives in (first, second, third):
        say(lives, 4, 2, 9, 3)
        publish(lives, 1, Outcome(3, 1))
    publish(second, 1, Outcome(4, 1), Released(3, 1))
    tick(first, second, until_s=70.0)
    third.hear_broadcast(Broadcast(EPOCH, 2, 1, [0, 0], [], [Outcome(4, 1)]), 70.0)
    assert third.conversation.joined
    expected = [Outcome(3, 1), *failed((2, 1), (4, 1), (9, 1))]
    assert step(first, second, third) == [expected] * 3
    assert [lives.unreleased for lives in (first, second, third)] == [4, 4, 4]


def test_a_rank_that_lacks_events_waits_for_them_also_when_the_coordinator_is_lost() -> None:
    first, second = rank(0), rank(1)
    publish(first, 1, Outcome(1, 1))
    tick(first, until_s=70.0)
    token = Token.unpack(first.head())
    assert (token.lost, token.head.number) == (True, 1)
    assert not second.reaches(token)
    publish(second, 1, Outcome(1, 1), now_s=70.0)
    assert step(first, second) == [[Outcome(1, 1)]] * 2


def test_the_failure_says_whose_fault_it_is_and_that_it_may_be_tried_again() -> None:
    (outcome,) = failed((1, 1))
    assert isinstance(outcome, Outcome)
    assert outcome.failure is not None
    assert outcome.failure.fault is Fault.COORDINATOR
    assert outcome.failure.retryable


def test_a_token_may_come_twice() -> None:
    """Rank 0 has read it for two steps before it drained the first."""
    first, second = rank(0), rank(1)
    for lives in (first, second):
        publish(lives, 1, Outcome(1, 1))
        assert len(step(lives)[0]) == 1
        say(lives, 7)
    tick(first, until_s=70.0)
    tokens = [Token.unpack(first.head()) for _ in range(2)]
    assert tokens[0] == tokens[1]
    for lives in (first, second):
        assert lives.drain(tokens[0], 70.0) == failed((7, 1))
        say(lives, 8)
        lives.hear(welcome(epoch=6), 70.0)
        assert lives.reaches(tokens[1]), "also when the next coordinator has been there meanwhile"
        assert lives.drain(tokens[1], 70.0) == []
        assert len(lives.conversation.outbox) == 1
    assert not Token.unpack(first.head()).lost


def test_the_next_life_begins_as_somebody_else_who_remembers_nothing() -> None:
    lives = rank()
    before = lives.conversation.hello
    publish(lives, 1, Outcome(1, 1))
    step(lives)
    lost(lives, 7)
    assert lives.conversation.standing.state is RankState.CONNECTING
    say(lives, 8)
    hello = lives.next_message(61.0)
    assert isinstance(hello, Hello)
    assert hello.instance != before.instance
    assert (hello.epoch, hello.acknowledged, hello.confirmed, hello.memory) == (0, 0, 0, None)
    assert (before.life, hello.life) == (0, 1)
    # What the former coordinator had under way finds nobody.
    publish(lives, 3, Outcome(8, 1), now_s=61.0)
    assert lives.inbox.have == 0
    lives.hear(welcome(epoch=6), 61.0)
    message = lives.next_message(61.0)
    assert isinstance(message, Submit)
    assert message.first == 1
    assert [item.room for item in message.items] == [8]


def test_a_coordinator_that_never_comes_does_not_keep_rooms_for_ever() -> None:
    lives = rank()
    lost(lives, 7)
    say(lives, 8)
    tick(lives, until_s=120.0)
    assert not judged(lives)
    tick(lives, until_s=121.5)
    token = Token.unpack(lives.head())
    assert (token.head, token.lost, token.life) == (Head(0, 0), True, 1)
    assert step(lives, now_s=122.0) == [failed((8, 1 + 1))], "numbers of former attempts are not used again"


def test_without_tokens_each_rank_judges_for_itself() -> None:
    lives = rank(1)
    say(lives, 7)
    tick(lives, until_s=70.0)
    assert judged(lives)
    assert Token.unpack(lives.head()) == Token(Head(EPOCH, 0)), "only rank 0's token says it"
    assert lives.drain(None, 70.0) == failed((7, 1))
    assert lives.drain(None, 70.0) == []


def test_a_judgement_of_its_own_means_nothing_to_a_rank_in_lockstep() -> None:
    first, second = rank(0), rank(1)
    say(second, 7)
    tick(second, until_s=70.0)
    assert second.judged
    assert step(first, second) == [[], []]


def test_what_another_thread_was_about_to_say() -> None:
    """Made before the loss was drained, said after it."""
    lives = rank()
    say(lives, 7)
    former = lives.inbox
    publish(lives, 1, Outcome(99, 1))
    step(lives)
    tick(lives, until_s=70.0)
    step(lives)
    lives.say(Open(7, 1), 1, former)
    lives.say(Open(8, 1), 1, former)
    assert isinstance(lives.next_message(70.0), Hello)
    lives.hear(welcome(epoch=6), 70.0)
    message = lives.next_message(70.0)
    assert isinstance(message, Submit)
    assert message.items == [Open(8, 0)]


# --- a rank that is new among others ---------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3, 100])
def test_a_new_rank_takes_part_in_the_life_that_it_finds(number: int) -> None:
    """However far the others had come in the one before: that has numbers of its own."""
    lives = Lives(rank().conversation.hello, "nowhere", SETTINGS, 0.0)
    lives.hear(Refused("outlived", "this is life 3", life=3), 0.0)
    hello = lives.next_message(0.1)
    assert isinstance(hello, Hello)
    assert hello.life == 3
    lives.hear(welcome(), 0.1)
    publish(lives, 5, *(Outcome(room, 1) for room in range(1, 6)))
    # The others have just begun that life with this token, which it has still to drain; perhaps twice.
    token = Token(Head(4, number), lost=True, life=2)
    for _ in range(2):
        assert lives.reaches(token)
        assert lives.drain(token, 1.0) == []
    assert lives.life == 3
    assert lives.conversation.joined
    assert len(lives.drain(Token(Head(EPOCH, 5)), 1.0)) == 5
    assert lives.drain(token, 1.0) == []
    assert lives.life == 3
    # The next loss is one for it, too.
    assert lives.drain(Token(Head(EPOCH, 5), lost=True, life=3), 1.0) == []
    assert lives.life == 4


def test_a_new_rank_may_have_drained_nothing_before() -> None:
    """As an engine does that begins to make steps at once."""
    lives = Lives(rank().conversation.hello, "nowhere", SETTINGS, 0.0)
    for token in (None, Token(Head(0, 0))):
        assert lives.drain(token, 0.0) == []
    lives.hear(Refused("outlived", "this is life 3", life=3), 0.0)
    assert lives.life == 3


def test_a_rank_that_had_its_place_waits_for_its_token() -> None:
    lives = rank()
    lives.hear(Refused("outlived", "this is life 1", life=1), 0.0)
    assert lives.life == 0


def test_a_rank_that_has_spoken_waits_for_its_token() -> None:
    lives = Lives(rank().conversation.hello, "nowhere", SETTINGS, 0.0)
    say(lives, 7)
    assert lives.drain(None, 0.0) == []
    lives.hear(Refused("outlived", "this is life 1", life=1), 0.0)
    assert lives.life == 0
    assert lives.drain(Token(Head(EPOCH, 0), lost=True), 1.0) == failed((7, 1))
    assert lives.life == 1


# --- pages -----------------------------------------------------------------------------------


def test_pages_are_released_when_rank_0_says_so() -> None:
    first, second = rank(0), rank(1)
    for lives in (first, second):
        publish(lives, 2, Outcome(1, 1), Outcome(2, 1))
        step(lives)
        lost(lives, 9, 7)
        assert lives.unproven
        assert lives.unreleased == 4
    first.proven(62.0)
    assert not first.flagged
    assert first.due_s() <= 62.0 + QUIET_HOLD_S
    first.tick(62.0 + QUIET_HOLD_S)
    token = Token.unpack(first.head())
    assert token.quiet
    assert not second.reaches(token)
    assert "g/1 holds the pages of 4 handoffs" in second.behind(token, 10)
    lacking = token._replace(head=Head(EPOCH, 3))
    assert "through event 3 of epoch 0x5" in second.behind(lacking, 10), "that comes first"
    released = [Released(1, 1), Released(2, 1), Released(7, 1), Released(9, 1)]
    assert first.drain(token, 63.0) == released
    assert not first.flagged
    second.proven(63.0)
    assert second.reaches(token)
    assert second.drain(token, 63.0) == released
    assert second.unreleased == 0
    assert second.drain(token, 63.0) == []


def test_a_rank_alone_does_not_wait_for_others() -> None:
    lives = lost(rank(size=1), 7)
    lives.proven(62.0)
    lives.tick(62.0)
    assert step(lives) == [[Released(7, 1)]]


def test_without_tokens_pages_are_released_as_soon_as_they_are_proven() -> None:
    lives = lost(rank(1), 7)
    assert lives.drain(None, 62.0) == []
    lives.proven(62.0)
    assert lives.conversation.news
    assert lives.drain(None, 62.0) == [Released(7, 1)]


def test_nothing_has_to_be_proven_where_nothing_is_held() -> None:
    lives = rank()
    say(lives, 7)
    publish(lives, 2, Outcome(7, 1), Released(7, 1))
    step(lives)
    lost(lives)
    assert not lives.unproven


def test_a_loss_that_costs_nothing_more_demands_nothing_more() -> None:
    """Where a coordinator stays away for hours, no endpoint is renewed every minute."""
    lives = lost(rank(), 7)
    assert lives.demands == 1
    tick(lives, until_s=130.0)
    assert step(lives, now_s=130.0) == [[]]
    assert lives.unproven
    say(lives, 8)
    tick(lives, until_s=200.0)
    assert step(lives, now_s=200.0) == [failed((8, 2))]
    assert lives.demands == 1, "nobody was ever told of that one"
    lives.proven(201.0)
    lives.tick(202.0)
    assert step(lives) == [[Released(7, 1), Released(8, 2)]]
    say(lives, 9)
    tick(lives, until_s=270.0)
    assert step(lives, now_s=270.0) == [failed((9, 3))]
    lives.tick(271.0)
    assert step(lives) == [[Released(9, 3)]]


def test_what_was_proven_does_not_count_for_the_next_loss() -> None:
    lives = lost(rank(), 7)
    lives.proven(62.0)
    lives.tick(70.0)
    lives.hear(welcome(epoch=6), 70.0)
    say(lives, 8)
    tick(lives, until_s=140.0)
    assert Token.unpack(lives.head()).lost
    assert step(lives, now_s=140.0) == [failed((8, 2))]
    assert lives.unproven
    assert not Token.unpack(lives.head()).quiet
    lives.proven(141.0)
    lives.tick(142.0)
    assert step(lives) == [[Released(7, 1), Released(8, 2)]]


# --- an endpoint that has moved --------------------------------------------------------------


def test_the_coordinator_is_told_of_a_new_endpoint() -> None:
    lives = rank()
    talk = lives.conversation
    assert isinstance(lives.next_message(0.0), Submit)
    talk.endpoint_moved(b"there", 1.0)
    hello = lives.next_message(1.0)
    assert isinstance(hello, Hello)
    assert (hello.endpoint, hello.instance, hello.epoch) == (b"there", talk.hello.instance, EPOCH)
    # The answer was to a hello of before.
    talk.endpoint_moved(b"elsewhere", 1.01)
    lives.hear(welcome(), 1.02)
    hello = lives.next_message(1.2)
    assert isinstance(hello, Hello)
    assert hello.endpoint == b"elsewhere"
    lives.hear(welcome(), 1.3)
    assert talk.joined
    assert not isinstance(lives.next_message(1.3), Hello)
