"""A process that is short of descriptors or threads: told as such, and outlived."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest
import zmq

from coordinator.client import ClientSettings, lines, sockets
from coordinator.errors import NotReadyError
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.client.conftest import Connect
    from tests.client.peer import Peer


class Want:
    """Stands in for a call: it fails for want of something as long as that lasts.

    Attributes:
        lasts: whether it does.
        tries: how often it has failed.

    """

    def __init__(self, call: Callable[..., object], error: Callable[[], Exception]) -> None:
        self.lasts = True
        self.tries = 0
        self._call = call
        self._error = error

    def __call__(self, *arguments: object) -> object:
        """Fail, or do it."""
        if not self.lasts:
            return self._call(*arguments)
        self.tries += 1
        raise self._error()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what failed tried again soon."""
    monkeypatch.setattr("coordinator.client.iothread._OPEN_AGAIN_S", 0.05, raising=False)


def test_a_rank_that_finds_no_socket_to_subscribe_with_finds_one_later(
    peer: Peer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator has not refused it, and the address is right."""
    want = Want(sockets.open_outcomes, lambda: zmq.ZMQError(errno.EMFILE))
    monkeypatch.setattr(lines, "open_outcomes", want)
    rank = connect(peer.control)
    eventually(lambda: want.tries >= 2, 10, "it is tried again")
    want.lasts = False
    rank.wait_ready(10)


def test_a_rank_that_finds_no_socket_for_its_next_coordinator_finds_one_later(
    peer: Peer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = connect(peer.control, settings=ClientSettings(away_after_s=0.3, coordinator_lost_s=0.3))
    rank.wait_ready(10)
    want = Want(sockets.open_control, lambda: zmq.ZMQError(errno.ENFILE))
    monkeypatch.setattr(lines, "open_control", want)
    peer.stop()
    eventually(lambda: [*rank.drain(through=rank.head)] or rank._lives.life, 10, "it is given up")
    tries = want.tries
    eventually(lambda: want.tries >= tries + 3, 10, "it is tried again and again")
    peer.restart(epoch=8)
    want.lasts = False
    rank.wait_ready(10)


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (os, "eventfd", lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
        (lines, "open_control", lambda: zmq.ZMQError(errno.EMFILE)),
        (threading.Thread, "start", lambda: RuntimeError("can't start new thread")),
    ],
    ids=["bell", "socket", "thread"],
)
def test_a_client_that_cannot_begin_for_want_of_anything_says_so_and_keeps_nothing(
    peer: Peer,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    what: str,
    error: Callable[[], Exception],
) -> None:
    connect(peer.control).close()
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(where, what, Want(lambda: None, error))
        with pytest.raises(NotReadyError, match="raise the limits of this process"):
            connect(peer.control)
    eventually(lambda: open_files() <= before, 10, "its descriptors are closed")
    connect(peer.control).wait_ready(10)
