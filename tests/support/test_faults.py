"""The fault tools do what they say: a test that trusts them must be able to."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq

from tests.support.faults import Faults, Weather, frozen
from tests.support.faults.zmtp import Splitter, encode
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.faults import Proxy
    from tests.support.processes import Programs

NUMBERS = list(range(2000))


class Echo:
    """A server that gives back what it gets."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.open = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        self.open += 1
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass
        self.open -= 1

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Faults() as faults:
        yield faults.proxy(echo.address)


def connect(proxy: Proxy) -> socket.socket:
    """A connection through the proxy, that waits a second at most."""
    connection = socket.create_connection(("127.0.0.1", int(proxy.address.rpartition(":")[2])), 5)
    connection.settimeout(5)
    return connection


def told(connection: socket.socket, text: bytes) -> bytes:
    """What comes back."""
    connection.sendall(text)
    return heard(connection, len(text))


def heard(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def silent(connection: socket.socket) -> bool:
    """Nothing comes within a short while."""
    connection.settimeout(0.2)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


# --- lines -----------------------------------------------------------------------------------


def test_a_good_line_changes_nothing_and_ends_with_its_ends(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        large = os.urandom(3_000_000)
        threading.Thread(target=first.sendall, args=(large,), daemon=True).start()
        assert heard(first, len(large)) == large
        assert told(second, b"hello") == b"hello"
        assert proxy.up.passed_bytes == proxy.down.passed_bytes == len(large) + 5
        assert (proxy.accepted, echo.open) == (2, 2)
    eventually(lambda: echo.open == 0, what="the server sees the end")


def test_a_cut_line_is_cut_at_both_ends_and_a_new_one_is_welcome(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as old:
        assert told(old, b"a") == b"a"
        proxy.cut()
        assert old.recv(1) == b""
        eventually(lambda: echo.open == 0, what="the server sees the end")
        with connect(proxy) as new:
            assert told(new, b"c") == b"c"


def test_a_stalled_line_holds_everything_back_until_it_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as line:
        assert told(line, b"a") == b"a"
        proxy.down.stall()
        line.sendall(b"b")
        assert silent(line)
        assert proxy.up.passed_bytes == 2, "each direction by itself"
        proxy.heal()
        assert heard(line, 1) == b"b"
        proxy.stall()
        line.settimeout(0.5)
        with pytest.raises(TimeoutError):
            line.sendall(b"x" * 50_000_000)
        proxy.heal()


def test_a_vanished_line_is_silent_at_both_ends(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as old, connect(proxy) as new:
        assert told(old, b"a") == b"a"
        assert told(new, b"a") == b"a"
        proxy.vanish()
        old.sendall(b"b")
        assert silent(old)
        assert echo.open == 2, "the server knows nothing"
        proxy.heal()
        assert silent(old), "what has vanished stays so"
        with connect(proxy) as third:
            assert told(third, b"c") == b"c"


def test_a_slow_line_delays_and_does_not_throttle(proxy: Proxy) -> None:
    with connect(proxy) as line:
        proxy.up.delay_s = 0.3
        began_s = time.monotonic()
        for _ in range(20):
            line.sendall(b"x")
            time.sleep(0.005)
        assert heard(line, 20) == b"x" * 20
        assert 0.3 <= time.monotonic() - began_s < 2.0


def test_a_refused_line_takes_nobody_and_then_again(proxy: Proxy) -> None:
    with connect(proxy) as old:
        proxy.refuse()
        assert old.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.heal()
    with connect(proxy) as new:
        assert told(new, b"c") == b"c"


def test_a_handshake_can_be_stopped_half_way(proxy: Proxy) -> None:
    proxy.down.stall(after_bytes=3)
    with connect(proxy) as half:
        half.sendall(b"abcdef")
        assert heard(half, 3) == b"abc"
        assert silent(half)
    proxy.heal()
    with connect(proxy) as whole:
        assert told(whole, b"abcdef") == b"abcdef"


def test_where_nobody_listens_the_connection_ends() -> None:
    with Faults() as faults, connect(faults.proxy("tcp://127.0.0.1:9")) as line:
        assert line.recv(1) == b""


# --- messages --------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_weather() -> None:
    first, again, other = [
        [arrived for number in NUMBERS for arrived in weather.let_through(number)]
        for weather in (Weather[int](7), Weather[int](7), Weather[int](8))
    ]
    assert first == again
    assert first != other


def test_the_shares_are_kept_and_nothing_is_invented() -> None:
    weather = Weather[int](3)
    arrived = [held for number in NUMBERS for held in weather.let_through(number)]
    weather.clear_up()
    arrived += [held for number in (2000, 2001) for held in weather.let_through(number)]
    assert weather.met["all"] == 2002
    assert 60 <= weather.met["lost"] <= 140
    assert 60 <= weather.met["doubled"] <= 140
    assert 140 <= weather.met["late"] <= 260
    assert len(set(arrived)) == 2002 - weather.met["lost"]
    assert len(arrived) == len(set(arrived)) + weather.met["doubled"]
    overtaken = sum(1 for before, after in itertools.pairwise(arrived) if before > after)
    assert overtaken > 100
    assert max(before - after for before, after in itertools.pairwise(arrived)) <= 4


@pytest.mark.parametrize("step", [1, 7, 64, 100_000])
def test_a_stream_is_cut_into_its_messages_wherever_its_bytes_are_cut(step: int) -> None:
    greeting, ready = bytes(range(64)), b"\x04\x05READY"
    messages = [[b""], [b"topic", b"x" * 300], [b"a", b"", b"c"], [b"y" * 70_000]]
    stream = greeting + ready + b"".join(encode(message) for message in messages[:2])
    stream += b"\x04\x05PING!" + b"".join(encode(message) for message in messages[2:])
    seen: list[list[bytes]] = []

    def rewrite(message: list[bytes]) -> list[list[bytes]]:
        seen.append(message)
        return [message, message] if len(message) == 3 else [message]

    splitter = Splitter(rewrite)
    arrived = b"".join(splitter.feed(stream[at : at + step]) for at in range(0, len(stream), step))
    assert seen == messages
    doubled = encode(messages[2])
    assert arrived == stream.replace(doubled, doubled + doubled)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_weather_over_a_real_socket(transport: str, ipc_address: str) -> None:
    weather = Weather[list[bytes]](5)
    with zmq.Context() as context, Faults() as faults, context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        publisher.bind(ipc_address if transport == "ipc" else "tcp://127.0.0.1:*")
        proxy = faults.proxy(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        proxy.down.rewrite = weather.let_through
        with context.socket(zmq.SUB) as subscriber:
            subscriber.linger = 0
            subscriber.subscribe(b"t")
            subscriber.connect(proxy.address)
            assert publisher.poll(5000)
            assert publisher.recv() == b"\x01t"
            for number in range(300):
                publisher.send_multipart([b"t", number.to_bytes(400, "big")])
            eventually(lambda: weather.met["all"] == 300, what="all messages on their way")
            got = []
            while subscriber.poll(200):
                topic, body = subscriber.recv_multipart()
                assert topic == b"t"
                assert len(body) == 400
                got.append(int.from_bytes(body, "big"))
    expected = Weather[int](5)
    assert got == [arrived for number in range(300) for arrived in expected.let_through(number)]
    assert min(weather.met[fate] for fate in ("lost", "doubled", "late")) > 0


# --- processes -------------------------------------------------------------------------------


def test_a_frozen_process_stands_still_for_the_block(programs: Programs) -> None:
    program = programs.start("/bin/sleep", "60")
    process = psutil.Process(program.process.pid)
    with frozen(process.pid):
        assert process.status() == psutil.STATUS_STOPPED
    eventually(lambda: process.status() != psutil.STATUS_STOPPED, what="it goes on")
