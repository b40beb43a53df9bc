"""The conversation by which a link knows that its peer is there. It needs no engine."""

from __future__ import annotations

import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from backends import mooncake_presence
from backends.base import BackendError
from backends.mooncake_presence import INCARNATION_BYTES, Presence, PresenceListener
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
#: What each caller has the listener's process open.
FILES = 17


@pytest.fixture
def listener() -> Iterator[PresenceListener]:
    listener = PresenceListener(HOST, FILES)
    yield listener
    listener.close()


@pytest.fixture
def call(listener: PresenceListener) -> Iterator[Callable[[], Presence]]:
    """Call the listener with this."""
    made: list[Presence] = []

    def make() -> Presence:
        made.append(Presence(HOST, listener.port, listener.incarnation, 2.0, 5.0))
        return made[-1]

    yield make
    for presence in made:
        presence.close()


def answered(presence: Presence, number: int) -> bool:
    assert presence.lost() == ""
    return presence.answers == number


def test_questions_are_answered(call: Callable[[], Presence]) -> None:
    presence, other = call(), call()
    assert [presence.ask() for _ in range(3)] == [1, 2, 3]
    eventually(lambda: answered(presence, 3), what="three answers")
    assert other.lost() == ""
    assert other.answers == 0


def test_to_confirm_is_to_wait_for_an_answer(call: Callable[[], Presence]) -> None:
    presence = call()
    for number in (1, 2):
        presence.confirm(2.0)
        assert presence.answers == number
    # An answer to an earlier question is none to this one.
    presence.ask()
    presence.confirm(2.0)
    assert presence.answers == 4


def test_it_is_not_confirmed_that_a_mute_one_is_there() -> None:
    with (
        socket.create_server((HOST, 0)) as mute,
        ThreadPoolExecutor() as threads,
    ):
        calling = threads.submit(Presence, HOST, mute.getsockname()[1], bytes(INCARNATION_BYTES), 2.0, 5.0)
        with mute.accept()[0] as caller:
            caller.sendall(b"+")
            presence = calling.result()
            with pytest.raises(BackendError, match=r"did not answer within 0\.1 s"):
                presence.confirm(0.1)
        # It is told at once when it has hung up.
        with pytest.raises(BackendError, match="connection"):
            presence.confirm(20.0)
        presence.close()


def test_the_end_of_the_listener_is_noticed(listener: PresenceListener, call: Callable[[], Presence]) -> None:
    presence = call()
    assert presence.lost() == ""
    listener.close()
    eventually(presence.lost, what="the loss is noticed")
    # A question does no harm then, and changes nothing.
    presence.ask()
    assert presence.lost()


def test_a_muted_one_does_not_say_that_it_is_there(
    listener: PresenceListener, call: Callable[[], Presence]
) -> None:
    """Its engines go meanwhile. It has not hung up: that it does last."""
    presence = call()
    listener.mute()
    with pytest.raises(BackendError, match=r"did not answer within 0\.2 s"):
        presence.confirm(0.2)
    with pytest.raises(BackendError, match=r"did not answer within 0\.2 s"):
        Presence(HOST, listener.port, listener.incarnation, 0.2, 5.0)
    assert presence.lost() == ""
    listener.close()
    eventually(presence.lost, what="it has hung up")


def test_who_would_open_too_many_files_is_refused(
    call: Callable[[], Presence], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that can accept no more fills the disk with messages, and burns a core."""
    presence = call()
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + FILES, most))
    try:
        with pytest.raises(BackendError, match="it may not open more files"):
            call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    assert "it needs 17 open files more" in caplog.text
    presence.confirm(2.0)
    call()


def test_who_says_nothing_gives_way_though_no_more_files_can_be_opened(
    listener: PresenceListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_presence, "_GREETING_S", 1.0)
    silent = [socket.create_connection((HOST, listener.port), 2.0) for _ in range(10)]
    eventually(lambda: len(listener._callers) == 10, what="all are taken")
    with socket.socket() as late:
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, most))
            late.connect((HOST, listener.port))
            eventually(lambda: len(listener._callers) == 1, 20, "only the last one is there")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
            for caller in silent:
                caller.close()


def test_another_incarnation_is_refused(listener: PresenceListener) -> None:
    for wrong in (
        bytes(INCARNATION_BYTES),
        listener.incarnation[:-1] + bytes([listener.incarnation[-1] ^ 1]),
    ):
        with pytest.raises(BackendError, match="is another incarnation"):
            Presence(HOST, listener.port, wrong, 2.0, 5.0)
    another = PresenceListener(HOST, FILES)
    another.close()
    assert another.incarnation != listener.incarnation


def test_nobody_there_is_told(listener: PresenceListener) -> None:
    listener.close()
    with pytest.raises(BackendError, match="refused"):
        Presence(HOST, listener.port, listener.incarnation, 2.0, 5.0)


def test_one_who_does_not_answer_is_told() -> None:
    with (
        socket.create_server((HOST, 0)) as mute,
        pytest.raises(BackendError, match=r"did not answer within 0\.1 s"),
    ):
        Presence(HOST, mute.getsockname()[1], bytes(INCARNATION_BYTES), 0.1, 5.0)


def test_a_greeting_may_come_in_pieces(listener: PresenceListener) -> None:
    with socket.create_connection((HOST, listener.port), 2.0) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(INCARNATION_BYTES):
            caller.sendall(listener.incarnation[position : position + 1])
        assert caller.recv(10) == b"+"
        caller.sendall(b"??")
        assert caller.recv(1) + caller.recv(1) == b"++"


def test_callers_that_talk_nonsense_are_hung_up_on(
    listener: PresenceListener, call: Callable[[], Presence]
) -> None:
    presence = call()
    with socket.create_connection((HOST, listener.port), 2.0) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert hung_up(caller)
    presence.ask()
    eventually(lambda: answered(presence, 1), what="an answer")


def test_a_caller_that_does_not_listen_is_hung_up_on(
    listener: PresenceListener, call: Callable[[], Presence]
) -> None:
    """Nothing is kept for it."""
    presence = call()
    with socket.create_connection((HOST, listener.port), 2.0) as caller:
        caller.sendall(listener.incarnation)
        with pytest.raises(ConnectionError):
            caller.sendall(b"?" * (64 << 20))
    presence.ask()
    eventually(lambda: answered(presence, 1), what="an answer")


def hung_up(caller: socket.socket) -> bool:
    """Wait for the other side to close."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True
