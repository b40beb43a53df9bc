"""What the kernel tells of an engine's sockets. Any event loop that listens on all addresses will do."""

from __future__ import annotations

import resource
import select
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from backends.base import BackendError
from backends.mooncake_sockets import EngineSockets, all_sockets, keep_alive
from tests.support.descriptors import open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
WILDCARD = "0.0.0.0"  # noqa: S104 - an engine does so


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What closes all sockets at the end."""
    with ExitStack() as closing:
        yield closing


def listen(stack: ExitStack, host: str) -> socket.socket:
    """Listen on an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return stack.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::"))


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


class Likeness:
    """The sockets of an engine: one for handshakes, and a loop with a listener and with connections."""

    def __init__(self, stack: ExitStack, host: str = "::") -> None:
        """Open them."""
        self._stack = stack
        self._epoll = stack.enter_context(select.epoll())
        self.handshakes = listen(stack, WILDCARD)
        self.data = listen(stack, host)
        self._epoll.register(self.data)

    def call(self, port: int) -> socket.socket:
        """Make one more connection."""
        connection = self._stack.enter_context(socket.create_connection((HOST, port)))
        self._epoll.register(connection)
        return connection

    def found(self, before: frozenset[str]) -> EngineSockets:
        """What is found of it."""
        return EngineSockets(before, port_of(self.handshakes))


@pytest.mark.parametrize("host", ["::", WILDCARD])
def test_an_engine_is_found_among_others(stack: ExitStack, host: str) -> None:
    Likeness(stack)
    listen(stack, WILDCARD)
    before = all_sockets()
    engine = Likeness(stack, host)
    # What others open meanwhile has no event loop, or is for this host only, or does not listen.
    listen(stack, WILDCARD)
    epoll = stack.enter_context(select.epoll())
    epoll.register(listen(stack, HOST))
    epoll.register(stack.enter_context(socket.create_connection((HOST, port_of(engine.data)))))
    assert engine.found(before).data_port == port_of(engine.data)


def test_an_engine_that_is_not_to_be_told_from_others_is_not_taken(stack: ExitStack) -> None:
    """What it would be told of its connections could be of another's."""
    before = all_sockets()
    engine = Likeness(stack)
    with pytest.raises(BackendError, match=r"not found .1 loops, 0 listeners."):
        EngineSockets(before, port_of(engine.data) + 1)
    with pytest.raises(BackendError, match=r"not found .0 loops, 0 listeners."):
        engine.found(all_sockets())
    Likeness(stack)
    with pytest.raises(BackendError, match=r"not found .2 loops, 1 listeners."):
        engine.found(before)


def test_connections_are_its_own_to_one_port(stack: ExitStack) -> None:
    peer, another_peer = listen(stack, HOST), listen(stack, HOST)
    another = Likeness(stack)
    before = all_sockets()
    engine = Likeness(stack)
    found = engine.found(before)
    assert found.connections(HOST, port_of(peer)) == []
    made = [engine.call(port_of(peer)) for _ in range(3)]
    alone = engine.call(port_of(another_peer))
    another.call(port_of(peer))
    assert sorted(found.connections(HOST, port_of(peer))) == sorted(each.fileno() for each in made)
    assert found.connections(HOST, port_of(another_peer)) == [alone.fileno()]
    assert found.connections("127.0.0.2", port_of(peer)) == []
    # One that was reset is none, though its descriptor is still there.
    made[0].close()
    with peer.accept()[0], peer.accept()[0] as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with pytest.raises(ConnectionResetError):
        made[1].recv(1)
    assert found.connections(HOST, port_of(peer)) == [made[2].fileno()]


def test_what_was_looked_at_is_as_it_was(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed, left behind, or made not to block, also where new Python sockets do not."""
    before = all_sockets()
    engine, peer = Likeness(stack), listen(stack, HOST)
    connection = engine.call(port_of(peer))
    opened = open_files()
    monkeypatch.setattr(socket, "getdefaulttimeout", lambda: 5.0)
    socket.setdefaulttimeout(5.0)
    try:
        assert engine.found(before).connections(HOST, port_of(peer)) == [connection.fileno()]
    finally:
        socket.setdefaulttimeout(None)
    assert open_files() == opened
    with peer.accept()[0] as caller:
        caller.sendall(b"!")
        # This would raise on a descriptor that does not block.
        assert socket.socket.recv(connection, 1) == b"!"
        assert connection.getblocking()


def test_that_no_file_can_be_opened_is_told(stack: ExitStack) -> None:
    before = all_sockets()
    engine = Likeness(stack)
    found = engine.found(before)
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        for look in (all_sockets, lambda: engine.found(before), lambda: found.connections(HOST, 1)):
            with pytest.raises(BackendError, match=r"cannot be looked at.*Too many open files"):
                look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_the_time_out_of_accept_is_set(stack: ExitStack) -> None:
    before = all_sockets()
    engine = Likeness(stack)
    engine.found(before).set_accept_timeout(1.25)
    # The kernel rounds it up to its ticks.
    assert 1.25 <= accept_timeout_s(engine.handshakes) < 1.27
    assert accept_timeout_s(engine.data) == 0


def accept_timeout_s(listener: socket.socket) -> float:
    timeout = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
    seconds, microseconds = struct.unpack("ll", timeout)
    return float(seconds + microseconds / 1e6)


def test_a_connection_is_kept_alive(stack: ExitStack) -> None:
    connection = Likeness(stack).call(port_of(listen(stack, HOST)))
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    keep_alive(connection.fileno())
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
