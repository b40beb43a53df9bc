"""The messages of one handoff, between processes and threads that do nothing else.

What a handoff cannot do without: a call goes from the engine's thread to the rank's I/O thread, what it says
to the coordinator's process, an order from there to the worker's, there to the thread that may block, and a
report and a verdict come back the same way; the other engine hears the verdict, too. The sockets are of the
kinds that the coordinator has, and the messages are those of a handoff. Nobody decides, plans, moves or logs
anything.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_RANK: Final = b"rank"
_WORKER: Final = b"worker"
_TOPICS: Final = (b"prefill\0", b"decode\0")
_PAGES: Final = bytes(64 * messages.PAGE_BYTES)
_WARM: Final = 50
#: Between two of them; a transfer takes as long.
_PAUSE_S: Final = 0.001
_PATIENCE_MS: Final = 30_000


def relays_us(count: int) -> list[float]:
    """Microseconds from a call in the engine's thread until its verdict is there, ``count`` times."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvc-bare-") as directory:
        addresses = (f"ipc://{directory}/control", f"ipc://{directory}/outcomes")
        ours, theirs = spawn.Pipe()
        rounds = _WARM + count
        processes = [
            spawn.Process(target=_coordinator, args=(addresses, rounds)),
            spawn.Process(target=_worker, args=(addresses, rounds)),
            spawn.Process(target=_rank, args=(addresses, rounds, theirs)),
            spawn.Process(target=_other_rank, args=(addresses, rounds)),
        ]
        started = []
        try:
            for process in processes:
                process.start()
                started.append(process)
            if not ours.poll(_PATIENCE_MS / 1000):
                message = f"the bare messages did not come back within {_PATIENCE_MS} ms"
                raise TimeoutError(message)
            times_us: list[float] = ours.recv()
        finally:
            for process in started:
                process.join(5)
                process.kill()
    return times_us[_WARM:]


class _Bell:
    """Something for another thread, and a descriptor that it can wait on."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def silence(self) -> None:
        os.eventfd_read(self.descriptor)


def _coordinator(addresses: tuple[str, str], rounds: int) -> None:
    """Answer each call with an order to the worker, and each report with a verdict to both ranks."""
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
            order = Commands([Move(room, "decode/0", _PAGES, _PAGES)])
            control.send_multipart([_WORKER, messages.encode(order)])
            decode_from_peer(_receive(control)[1])
            for topic in _TOPICS:
                verdict = Broadcast(1, room, room - 1, [room], [], [Outcome(room, 1)])
                outcomes.send_multipart([topic, messages.encode(verdict)])
        outcomes.close(1000)


def _worker(addresses: tuple[str, str], rounds: int) -> None:
    """Hand each order to a thread, and report when it has had it."""
    orders: SimpleQueue[messages.ToWorker] = SimpleQueue()
    report = Reports([MoveDone(1, 1 << 20, 0.001)])
    bell = _Bell()

    def lane() -> None:
        for _ in range(rounds):
            orders.get()
            bell.ring()

    threading.Thread(target=lane, daemon=True).start()
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


def _rank(addresses: tuple[str, str], rounds: int, driver: Connection) -> None:
    """Be an engine that hands over one thing after the other."""
    bell, verdicts, ready = _Bell(), SimpleQueue[Broadcast](), threading.Event()
    call = Submit(1, 1, 0, 0, listening=True, items=[Send(1, 0, _PAGES, last=True)])

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
    times_us = []
    for _ in range(rounds):
        time.sleep(_PAUSE_S)
        began_s = time.monotonic()
        bell.ring()
        verdicts.get()
        times_us.append(1e6 * (time.monotonic() - began_s))
    thread.join(5)
    driver.send(times_us)


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
