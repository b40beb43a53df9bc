"""What the kernel tells of an engine's sockets. Any event loop that listens on all addresses will do."""

from __future__ import annotations

import select
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from backends import mooncake_sockets as sockets
from tests.support.descriptors import open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
WILDCARD = "0.0.0.0"  # noqa: S104 - an engine does so


@pytest.fixture
def listen() -> Iterator[Callable[..., socket.socket]]:
    """Listen on an address with this."""
    with ExitStack() as stack:

        def make(host: str) -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
            return stack.enter_context(listener)

        yield make


class Loop:
    """An event loop as an engine has one: an epoll instance, its listener, and its connections."""

    def __init__(self, stack: ExitStack, listener: socket.socket) -> None:
        """Wait for callers."""
        self._stack = stack
        self._epoll = stack.enter_context(select.epoll())
        self._epoll.register(listener)
        self.port = port_of(listener)

    def call(self, port: int) -> socket.socket:
        """Make one more connection."""
        connection = self._stack.enter_context(socket.create_connection((HOST, port)))
        self._epoll.register(connection)
        return connection


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def accept_timeout_s(listener: socket.socket) -> float:
    timeout = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
    seconds, microseconds = struct.unpack("ll", timeout)
    return float(seconds + microseconds / 1e6)


def test_only_listeners_on_all_addresses_count(listen: Callable[..., socket.socket]) -> None:
    before = sockets.wildcard_ports()
    first, second, narrow = listen(WILDCARD), listen("::"), listen(HOST)
    with socket.create_connection((HOST, port_of(first))), socket.socket() as bound:
        bound.bind((WILDCARD, 0))
        assert sockets.wildcard_ports() - before == {port_of(first), port_of(second)}
        assert port_of(narrow) not in sockets.wildcard_ports()


def test_connections_are_those_of_one_loop_to_one_port(listen: Callable[..., socket.socket]) -> None:
    peer, another_peer = listen(HOST), listen(HOST)
    with ExitStack() as stack:
        ours, another = (Loop(stack, listen(wildcard)) for wildcard in ("::", WILDCARD))
        assert sockets.connections(ours.port, HOST, port_of(peer)) == 0
        made = [ours.call(port_of(peer)) for _ in range(3)]
        ours.call(port_of(another_peer))
        another.call(port_of(peer))
        assert sockets.connections(ours.port, HOST, port_of(peer)) == 3
        assert sockets.connections(ours.port, HOST, port_of(another_peer)) == 1
        assert sockets.connections(another.port, HOST, port_of(peer)) == 1
        assert sockets.connections(ours.port, "127.0.0.2", port_of(peer)) == 0
        assert sockets.connections(port_of(peer), HOST, port_of(peer)) == 0
        # One that was reset is none, though its descriptor is still there.
        made[0].close()
        with peer.accept()[0], peer.accept()[0] as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with pytest.raises(ConnectionResetError):
            made[1].recv(1)
        assert sockets.connections(ours.port, HOST, port_of(peer)) == 1


def test_what_was_looked_at_is_as_it_was(listen: Callable[..., socket.socket]) -> None:
    """Nothing is closed, made to block, or left behind."""
    listener = listen(WILDCARD)
    listener.setblocking(False)  # noqa: FBT003 - its own parameter
    before = open_files()
    sockets.wildcard_ports()
    sockets.connections(port_of(listener), HOST, 1)
    assert open_files() == before
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_the_time_out_of_accept_is_set(listen: Callable[..., socket.socket]) -> None:
    listener, other = listen(WILDCARD), listen(WILDCARD)
    assert sockets.set_accept_timeout(port_of(listener), 1.25)
    # The kernel rounds it up to its ticks.
    assert 1.25 <= accept_timeout_s(listener) < 1.27
    assert accept_timeout_s(other) == 0
    port = port_of(listener)
    listener.close()
    assert not sockets.set_accept_timeout(port, 1.0)
