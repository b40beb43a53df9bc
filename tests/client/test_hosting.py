"""A prefill rank that runs its worker itself: lives, lines that break, links that cannot be fenced."""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
import zmq

from backends.base import BackendError
from backends.loopback import LoopbackBackend, LoopbackLink
from coordinator.client import Endpoint, KVPool
from coordinator.client.hosting import Hosting
from coordinator.client.introduction import introduction
from coordinator.errors import PoolBusyError
from coordinator.messages import (
    Commands,
    Connected,
    ConnectPeer,
    Move,
    MoveDone,
    Refused,
    Report,
    Reports,
    Role,
    Stop,
    WorkerBye,
    WorkerHello,
    WorkerOrders,
    decode_from_peer,
    encode,
)
from coordinator.worker.host import WorkerHost
from coordinator.worker.memory import MappedPool
from coordinator.worker.outbox import Outbox
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backends.base import Region
    from coordinator.messages import FromPeer, ToWorker

PAGES = 8
PRESENT, NEXT = 77, 78
PATIENCE_MS = 10_000
QUIET_S = 0.3


class Desk:
    """The coordinator's end of a worker's line."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.context = zmq.Context()
        self.identity = b""
        self.reports: list[Report] = []
        self.open()

    def open(self) -> None:
        """Listen."""
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(self.address)

    def receive(self) -> FromPeer:
        """Receive the next message that is no report."""
        while True:
            assert self.socket.poll(PATIENCE_MS), "nothing came"
            self.identity, frame = self.socket.recv_multipart()
            message = decode_from_peer(frame)
            if not isinstance(message, Reports):
                return message
            self.reports += message.items

    def report(self, kind: type[Report]) -> Report:
        """Wait for a report."""
        while True:
            while self.reports:
                report = self.reports.pop(0)
                if isinstance(report, kind):
                    return report
            assert self.socket.poll(PATIENCE_MS), f"no {kind.__name__} came"
            self.identity, frame = self.socket.recv_multipart()
            message = decode_from_peer(frame)
            assert isinstance(message, Reports), message
            self.reports += message.items

    def hello(self) -> WorkerHello:
        """Receive an introduction."""
        message = self.receive()
        assert isinstance(message, WorkerHello), message
        return message

    def bye(self) -> WorkerBye:
        """Receive a last word."""
        message = self.receive()
        assert isinstance(message, WorkerBye), message
        return message

    def quiet(self) -> bool:
        """Whether nothing but reports comes for a while."""
        deadline_s = time.monotonic() + QUIET_S
        while (left_s := deadline_s - time.monotonic()) > 0 and self.socket.poll(round(1000 * left_s)):
            _, frame = self.socket.recv_multipart()
            if not isinstance(decode_from_peer(frame), Reports):
                return False
        return True

    def send(self, message: ToWorker) -> None:
        """Answer."""
        self.socket.send_multipart([self.identity, encode(message)])

    def close(self) -> None:
        """Hang up."""
        self.socket.close(0)

    def end(self) -> None:
        """Close everything."""
        self.context.destroy(0)


class Scene:
    """A desk, a private pool with a worker for it, and a decode rank's endpoint."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.desk = Desk(f"ipc://{directory}/control")
        stack.callback(self.desk.end)
        self.tensors = [torch.zeros(2, PAGES, 256, dtype=torch.uint8) for _ in range(2)]
        self.pool = stack.enter_context(KVPool.wrap(self.tensors, LAYOUT))
        self.target = stack.enter_context(KVPool.allocate(LAYOUT, PAGES))
        self.endpoint = stack.enter_context(Endpoint(self.target, "loopback"))
        self.hosting = self.host(self.pool)
        stack.callback(lambda: self.hosting.stop(5))

    def host(self, pool: KVPool) -> Hosting:
        """Host a worker for a pool."""
        hello = introduction(Role.PREFILL, self.desk.address, "p", 0, 1, pool)
        return Hosting(pool, hello, self.desk.address, None)

    def connect(self) -> None:
        """Have the worker connect to decode."""
        command = ConnectPeer("d/0", self.endpoint.address, LAYOUT, 1, 0, PAGES)
        self.desk.send(Commands([command]))
        self.desk.report(Connected)

    def move(self, number: int, page: int) -> None:
        """Have a page moved onto the same one of decode's, and compare it."""
        for tensor in self.tensors:
            tensor[:, page] = torch.randint(256, (256,), dtype=torch.uint8)
        packed = page.to_bytes(4, "little")
        self.desk.send(Commands([Move(number, "d/0", packed, packed)]))
        self.desk.report(MoveDone)
        expected = torch.cat([tensor[:, page] for tensor in self.tensors])
        assert torch.equal(self.target.tensor[:, page], expected)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing moves on account of the life before the next one."""
        return self.hosting.serves_only(NEXT)


@pytest.fixture
def scene(short_dir: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(short_dir, stack)


def orders(backend: str = "loopback", **options: object) -> WorkerOrders:
    """What a coordinator orders; each time another worker."""
    return WorkerOrders(secrets.token_bytes(32), "p-0", backend, options, 0.05)


def threads() -> list[str]:
    """The threads of workers and their lanes; other tests leave lanes to other peers that hang for ever."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kv-worker-") or name == "lane d/0"]


def crash(*_: object) -> None:
    """Break what every part promises."""
    raise ZeroDivisionError


def no_thread(*_: object) -> None:
    """Fail as the start of a thread does where the system allows no more of them."""
    message = "can't start new thread"
    raise RuntimeError(message)


def test_nothing_runs_before_it_is_ordered_and_nothing_after_the_end(scene: Scene) -> None:
    assert threads() == []
    assert scene.is_quiet
    scene.hosting.follow(None, PRESENT)
    assert threads() == []
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()
    scene.connect()
    assert sorted(threads()) == ["kv-worker-p/0", "lane d/0"]
    scene.hosting.stop(5)
    assert threads() == []
    assert scene.desk.bye().why == "it was told to end"
    scene.hosting.follow(orders(), PRESENT)
    assert threads() == []


def test_after_the_end_nothing_begins_that_had_never_run(scene: Scene) -> None:
    scene.hosting.stop(5)
    scene.hosting.follow(orders(), PRESENT)
    assert threads() == []
    assert scene.is_quiet


def test_an_engine_that_has_started_and_cannot_be_used_is_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = LoopbackBackend.close

    def refuse(self: LoopbackBackend, _: Region) -> int:
        message = f"{self.agent}: as the test says"
        raise BackendError(message)

    def note(self: LoopbackBackend) -> None:
        closed.append(self.agent)
        close(self)

    monkeypatch.setattr(LoopbackBackend, "register", refuse)
    monkeypatch.setattr(LoopbackBackend, "close", note)
    scene.hosting.follow(orders(), PRESENT)
    why = scene.desk.bye().why
    assert "as the test says" in why
    assert [agent in why for agent in closed] == [True]


def test_a_worker_that_does_not_end_in_time_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages may still be read, and whoever stops it goes on."""
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()
    may_end = threading.Event()
    close = WorkerHost.close

    def wait(host: WorkerHost, timeout_s: float) -> bool:
        assert may_end.wait(10)
        return close(host, timeout_s)

    monkeypatch.setattr(WorkerHost, "close", wait)
    scene.hosting.stop(0.01)
    assert "the worker of p/0 has not ended within 0.01 s: its pages may still be read" in caplog.text
    may_end.set()
    caplog.clear()
    scene.hosting.stop(10)
    assert not caplog.text
    assert scene.is_quiet


def test_pages_of_two_regions_travel_and_the_same_orders_mean_the_same_worker(scene: Scene) -> None:
    ours = orders()
    scene.hosting.follow(ours, PRESENT)
    hello = scene.desk.hello()
    assert hello.token == ours.token
    assert not hello.lands_after_settled
    scene.connect()
    scene.move(1, 3)
    again = WorkerOrders(ours.token, ours.label, ours.backend, ours.options, ours.heartbeat_s)
    scene.hosting.follow(again, PRESENT)
    scene.move(2, 5)
    assert scene.desk.quiet()


def test_other_orders_end_the_former_life_first(scene: Scene) -> None:
    former, present = orders(), orders()
    scene.hosting.follow(former, PRESENT)
    scene.desk.hello()
    scene.connect()
    scene.hosting.follow(present, NEXT)
    assert scene.desk.bye().token == former.token
    assert scene.desk.hello().token == present.token
    assert scene.is_quiet
    scene.connect()
    scene.move(1, 3)


def test_a_broken_line_is_the_end_of_a_life_and_the_beginning_of_the_next(scene: Scene) -> None:
    ours = orders()
    scene.hosting.follow(ours, PRESENT)
    scene.desk.hello()
    scene.connect()
    scene.desk.close()
    eventually(lambda: "lane d/0" not in threads(), 5, "its links are fenced")
    scene.desk.open()
    assert scene.desk.hello().token == ours.token
    scene.connect()
    scene.move(1, 3)


def test_who_is_not_known_comes_back_in_peace(scene: Scene) -> None:
    scene.hosting.follow(orders(), PRESENT)
    for _ in range(2):
        scene.desk.hello()
        scene.desk.send(Refused("unknown", "as the test says"))
    scene.desk.hello()
    scene.connect()
    scene.move(1, 3)


def test_told_to_stop_it_waits_for_other_orders(scene: Scene) -> None:
    ours = orders()
    scene.hosting.follow(ours, PRESENT)
    scene.desk.hello()
    scene.connect()
    scene.desk.send(Stop())
    assert scene.desk.bye().token == ours.token
    assert scene.desk.quiet()
    assert scene.is_quiet
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (orders("carrier-pigeon"), "there is no backend named 'carrier-pigeon'"),
        (orders(speed=3), "loopback options"),
    ],
)
def test_what_cannot_run_says_why_and_waits_for_other_orders(
    scene: Scene, ours: WorkerOrders, why: str
) -> None:
    scene.hosting.follow(ours, PRESENT)
    bye = scene.desk.bye()
    assert bye.token == ours.token
    assert why in bye.why
    assert scene.is_quiet
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()


def test_a_link_that_cannot_be_fenced_holds_everything_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is proven, and no next life begins, until it is fenced after all."""
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()
    scene.connect()
    fence = LoopbackLink.fence
    attempts = threading.Semaphore(0)

    def refuse(_: LoopbackLink) -> None:
        attempts.release()
        message = "as the test says"
        raise BackendError(message)

    monkeypatch.setattr(LoopbackLink, "fence", refuse)
    monkeypatch.setattr("coordinator.client.hosting._FENCE_S", 0.05)
    assert not scene.is_quiet
    present = orders()
    scene.hosting.follow(present, NEXT)
    for _ in range(3):
        assert attempts.acquire(timeout=10)
    assert not scene.is_quiet
    assert scene.desk.quiet()
    assert "the link to d/0 cannot be fenced: as the test says" in caplog.text
    assert "the worker of p/0 holds pages: a link is not fenced yet" in caplog.text
    monkeypatch.setattr(LoopbackLink, "fence", fence)
    scene.desk.bye()
    assert scene.desk.hello().token == present.token
    assert scene.is_quiet


def test_a_lane_that_crashes_ends_the_life(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()
    scene.connect()

    with monkeypatch.context() as patch:
        patch.setattr(LoopbackLink, "write", crash)
        packed = (1).to_bytes(4, "little")
        scene.desk.send(Commands([Move(1, "d/0", packed, packed)]))
        scene.desk.hello()
    scene.connect()
    scene.move(2, 3)


def test_after_a_crash_of_a_lane_whose_link_cannot_be_fenced_nothing_is_ever_quiet(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the end of the process helps: better no page than a wrong one."""
    scene.hosting.follow(orders(), PRESENT)
    scene.desk.hello()
    scene.connect()

    def refuse(*_: object) -> bool:
        message = "as the test says"
        raise BackendError(message)

    monkeypatch.setattr(WorkerHost, "close", refuse)
    scene.hosting.follow(orders(), NEXT)
    eventually(lambda: "kv-worker-p/0" not in threads(), 5, "the worker gives up")
    assert not scene.is_quiet
    assert scene.desk.quiet()


def test_a_life_that_ends_by_a_bug_fences_its_links_before_anything_is_given_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of other tests, whose links cannot be fenced.
    before = threads()
    with KVPool.allocate(LAYOUT, PAGES) as shared:
        hosting = scene.host(shared)
        hosting.follow(orders(), PRESENT)
        scene.desk.hello()
        scene.connect()
        with monkeypatch.context() as patch:
            patch.setattr(WorkerHost, "obey", crash)
            scene.desk.send(Commands([]))
            eventually(lambda: threads() == before, 5, "its lane and the worker end")
        MappedPool(shared.path, shared.size_bytes, NEXT).close()


def test_what_cannot_be_fenced_after_a_bug_keeps_the_pool_locked_and_hears_its_lanes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lane's next report would be written to whatever has got its descriptor."""
    closed: list[Outbox] = []
    monkeypatch.setattr(Outbox, "close", closed.append)
    monkeypatch.setattr("coordinator.worker.memory.LOCK_S", 0.05)
    with KVPool.allocate(LAYOUT, PAGES) as shared:
        hosting = scene.host(shared)
        hosting.follow(orders(), PRESENT)
        scene.desk.hello()
        scene.connect()
        monkeypatch.setattr(WorkerHost, "obey", crash)
        monkeypatch.setattr(WorkerHost, "close", crash)
        scene.desk.send(Commands([]))
        eventually(lambda: "kv-worker-p/0" not in threads(), 5, "the worker gives up")
        assert not hosting.serves_only(NEXT)
        assert not closed
        with pytest.raises(PoolBusyError):
            MappedPool(shared.path, shared.size_bytes, NEXT)


@pytest.mark.parametrize("what", ["open_control", "Outbox", "_monitored"])
def test_a_want_of_descriptors_passes_and_holds_nothing_meanwhile(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nothing moved yet, so the page rules of the next life need not wait for it."""
    tries = threading.Semaphore(0)

    def refuse(*_: object) -> None:
        tries.release()
        if what == "Outbox":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise zmq.ZMQError(errno.EMFILE)

    ours = orders()
    with monkeypatch.context() as patch:
        patch.setattr(f"coordinator.client.hosting.{what}", refuse)
        scene.hosting.follow(ours, PRESENT)
        for _ in range(2):
            assert tries.acquire(timeout=10)
        eventually(lambda: scene.hosting._moves_for is None, 5, "nothing may move")
    assert scene.desk.hello().token == ours.token
    scene.connect()
    scene.move(1, 3)
    scene.hosting.stop(5)
    assert scene.is_quiet


@pytest.mark.parametrize("number", [1, 2])
def test_a_pool_that_cannot_be_opened_for_want_of_descriptors_is_opened_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """First it is locked, then it is registered with the backend."""
    opened: list[str] = []
    real = os.open
    with KVPool.allocate(LAYOUT, PAGES) as shared:

        def scarce(path: str, *arguments: int, **more: int) -> int:
            if path == shared.path:
                opened.append(path)
                if len(opened) == number:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path, *arguments, **more)

        monkeypatch.setattr(os, "open", scarce)
        hosting = scene.host(shared)
        ours = orders()
        hosting.follow(ours, PRESENT)
        assert scene.desk.hello().token == ours.token
        hosting.stop(5)
    assert len(opened) == number + 2


def test_a_want_of_threads_passes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks for the worker goes on without it, and asks again."""
    ours = orders()
    monkeypatch.setattr("coordinator.client.hosting._START_AGAIN_S", 0.0, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        scene.hosting.follow(ours, PRESENT)
        scene.hosting.follow(ours, PRESENT)
    assert caplog.text.count("the worker of p/0 cannot run yet: can't start new thread") == 2
    assert scene.is_quiet
    scene.hosting.follow(ours, PRESENT)
    assert scene.desk.hello().token == ours.token
    scene.connect()
    scene.move(1, 3)


def test_a_thread_that_cannot_be_had_is_not_asked_for_all_the_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for _ in range(3):
        scene.hosting.follow(orders(), PRESENT)
    assert caplog.text.count("cannot run yet") == 1
    scene.hosting.stop(5)


def test_a_pool_with_a_file_is_locked_as_by_a_worker_process(scene: Scene) -> None:
    with KVPool.allocate(LAYOUT, PAGES) as shared:
        hosting = scene.host(shared)
        other = MappedPool(shared.path, shared.size_bytes, PRESENT)
        hosting.follow(orders(), NEXT)
        assert scene.desk.quiet()
        other.close()
        scene.desk.hello()
        hosting.stop(5)
        MappedPool(shared.path, shared.size_bytes, PRESENT).close()
