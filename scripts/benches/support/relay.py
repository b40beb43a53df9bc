"""One handoff without a coordinator's work: its messages and its bytes, by processes that do nothing else.

What a handoff cannot do without: a call goes from the engine's thread to the rank's I/O thread, what it says
to the coordinator's process, an order from there to the worker's, there to the thread that may block, which
has the bare engine write the pages; a report and a verdict come back the same way, and the other engine hears
the verdict, too. The sockets are of the kinds that the coordinator has, and the messages are those of a
handoff. Nobody decides, plans or logs anything.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import zmq

from coordinator import messages
from coordinator.messages import (
    Broadcast,
    Commands,
    Move,
    MoveDone,
    Outcome,
    Reports,
    Send,
    Submit,
    decode_broadcast,
    decode_from_peer,
    decode_to_worker,
)
from scripts.benches.support import bare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

_RANK: Final = b"rank"
_WORKER: Final = b"worker"
_TOPICS: Final = (b"prefill\0", b"decode\0")
_WARM: Final = 50
_PATIENCE_MS: Final = 60_000


class Cargo(NamedTuple):
    """What is written, and to where.

    Attributes:
        backend: whose bare engine.
        options: of the backend.
        address: of a receiver, whose pool has the same geometry.
        geometry: of the pool; its address is of no use here.
        source: pages that each handoff reads, int32.
        destination: pages that it writes, int32.

    """

    backend: str
    options: Mapping[str, object]
    address: bytes
    geometry: bare.Memory
    source: NDArray[np.int32]
    destination: NDArray[np.int32]


class _Carrier:
    """Memory, and a bare engine that writes the cargo out of it."""

    def __init__(self, cargo: Cargo) -> None:
        self._cargo = cargo
        self._memory = mmap.mmap(-1, cargo.geometry.size_bytes)
        octets = np.frombuffer(self._memory, np.uint8)
        memory = bare.Memory(
            octets.ctypes.data, cargo.geometry.block_bytes, cargo.geometry.planes, cargo.geometry.pages
        )
        octets.reshape(memory.count, memory.block_bytes)[memory.blocks(cargo.source)] = 1
        self._sender = bare.sender(cargo.backend, cargo.options, memory, cargo.address)

    def carry(self) -> None:
        """Write all of it, and wait until it has arrived."""
        transfer = self._sender.post(self._cargo.source, self._cargo.destination)
        while not self._sender.done(transfer):
            time.sleep(bare.POLL_S)

    def close(self) -> None:
        self._sender.close()


def relays(cargo: Cargo, count: int) -> list[tuple[float, float]]:
    """Seconds of a bare transfer and of a relayed one after it, ``count`` times.

    The second goes from a call in the engine's thread until its verdict is there.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvc-bare-") as directory:
        addresses = (f"ipc://{directory}/control", f"ipc://{directory}/outcomes")
        ours, theirs = spawn.Pipe()
        rounds = _WARM + count
        processes = [
            spawn.Process(target=_coordinator, args=(addresses, rounds, cargo)),
            spawn.Process(target=_worker, args=(addresses, rounds, cargo)),
            spawn.Process(target=_rank, args=(addresses, rounds, cargo, theirs)),
            spawn.Process(target=_other_rank, args=(addresses, rounds)),
        ]
        started = []
        try:
            for process in processes:
                process.start()
                started.append(process)
            # So that the end of the rank ends the wait.
            theirs.close()
            if not ours.poll(_PATIENCE_MS / 1000):
                message = f"the relayed transfers are not over within {_PATIENCE_MS} ms"
                raise TimeoutError(message)
            times: list[tuple[float, float]] = ours.recv()
        finally:
            for process in started:
                process.join(5)
                process.kill()
    return times[_WARM:]


class _Bell:
    """Something for another thread, and a descriptor that it can wait on."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        os.eventfd_read(self.descriptor)


def _packed(cargo: Cargo) -> bytes:
    """As many page numbers as a message has."""
    return cargo.source.astype("<i4").tobytes()


def _coordinator(addresses: tuple[str, str], rounds: int, cargo: Cargo) -> None:
    """Answer each call with an order to the worker, and each report with a verdict to both ranks."""
    pages = _packed(cargo)
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as control,
        context.socket(zmq.XPUB) as outcomes,
    ):
        control.bind(addresses[0])
        outcomes.bind(addresses[1])
        for _ in _TOPICS:
            _receive(outcomes)
        for _ in (_RANK, _WORKER):
            _receive(control)
        control.send_multipart([_RANK, b"both are here"])
        for room in range(1, rounds + 1):
            decode_from_peer(_receive(control)[1])
            order = Commands([Move(room, "decode/0", pages, pages)])
            control.send_multipart([_WORKER, messages.encode(order)])
            decode_from_peer(_receive(control)[1])
            for topic in _TOPICS:
                verdict = Broadcast(1, room, room - 1, [room], [], [Outcome(room, 1)])
                outcomes.send_multipart([topic, messages.encode(verdict)])
        outcomes.close(1000)


def _worker(addresses: tuple[str, str], rounds: int, cargo: Cargo) -> None:
    """Hand each order to a thread, and report when that has obeyed it."""
    carrier = _Carrier(cargo)
    orders: SimpleQueue[messages.ToWorker] = SimpleQueue()
    report = Reports([MoveDone(1, 1 << 20, 0.001)])
    bell = _Bell()

    def lane() -> None:
        for _ in range(rounds):
            orders.get()
            carrier.carry()
            bell.ring()

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.ROUTING_ID, _WORKER)
        line.connect(addresses[0])
        line.send(b"hello")
        _serve(
            line,
            bell,
            lambda: orders.put(decode_to_worker(line.recv())),
            lambda: line.send(messages.encode(report)),
            rounds,
        )
        line.close(1000)
    thread.join(5)
    carrier.close()


def _rank(addresses: tuple[str, str], rounds: int, cargo: Cargo, driver: Connection) -> None:
    """Be an engine that hands over one thing after the other, and writes each by itself before."""
    carrier, pages = _Carrier(cargo), _packed(cargo)
    bell, verdicts, ready = _Bell(), SimpleQueue[Broadcast](), threading.Event()
    call = Submit(1, 1, 0, 0, listening=True, items=[Send(1, 0, pages, last=True)])

    def io_thread() -> None:
        with (
            zmq.Context() as context,
            context.socket(zmq.DEALER) as line,
            context.socket(zmq.SUB) as outcomes,
        ):
            line.setsockopt(zmq.ROUTING_ID, _RANK)
            outcomes.setsockopt(zmq.SUBSCRIBE, _TOPICS[0])
            outcomes.connect(addresses[1])
            line.connect(addresses[0])
            line.send(b"hello")
            _receive(line)
            ready.set()
            _serve(
                outcomes,
                bell,
                lambda: verdicts.put(decode_broadcast(outcomes.recv_multipart()[1])),
                lambda: line.send(messages.encode(call)),
                rounds,
            )

    thread = threading.Thread(target=io_thread, daemon=True)
    thread.start()
    ready.wait(_PATIENCE_MS / 1000)
    times = []
    for _ in range(rounds):
        began_s = time.monotonic()
        carrier.carry()
        between_s = time.monotonic()
        bell.ring()
        verdicts.get()
        times.append((between_s - began_s, time.monotonic() - between_s))
    thread.join(5)
    carrier.close()
    driver.send(times)


def _other_rank(addresses: tuple[str, str], rounds: int) -> None:
    """Be an engine that hears of it."""
    verdicts = SimpleQueue[Broadcast]()

    def io_thread() -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as outcomes:
            outcomes.setsockopt(zmq.SUBSCRIBE, _TOPICS[1])
            outcomes.connect(addresses[1])
            for _ in range(rounds):
                verdicts.put(decode_broadcast(_receive(outcomes)[1]))

    threading.Thread(target=io_thread, daemon=True).start()
    for _ in range(rounds):
        verdicts.get()


def _serve(
    socket: zmq.Socket[bytes], bell: _Bell, take: Callable[[], None], rang: Callable[[], None], rounds: int
) -> None:
    """Call ``take`` for each message and ``rang`` for each ring, until there were ``rounds`` of both."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(bell.descriptor, zmq.POLLIN)
    left = {"take": rounds, "rang": rounds}
    while any(left.values()):
        ready = dict(poller.poll(_PATIENCE_MS))
        if not ready:
            message = f"nothing happened for {_PATIENCE_MS} ms"
            raise TimeoutError(message)
        if bell.descriptor in ready:
            bell.silence()
            rang()
            left["rang"] -= 1
        if socket in ready:
            take()
            left["take"] -= 1


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    _expect(socket)
    return socket.recv_multipart()


def _expect(socket: zmq.Socket[bytes]) -> None:
    if not socket.poll(_PATIENCE_MS):
        message = f"no message within {_PATIENCE_MS} ms"
        raise TimeoutError(message)
