"""Nixl links whose large writes are posted by threads of their own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import (
    BackendError,
    ConnectError,
    PeerDisconnectedError,
    Status,
    Transfer,
    TransferError,
)
from tests.backends.rigs import LARGE_BYTES, PATIENCE_S, ROOT, Peer, Rig, until_done, until_terminal, whole
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

pytest.importorskip("backends.nixl", reason="the nixl wheel is not installed", exc_type=ImportError)

from backends import nixl_threads
from backends.nixl import NixlBackend, Options
from backends.nixl_link import NixlLink
from backends.nixl_threads import QueuedTransfer, ThreadedLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend
    from tests.backends.memory import SharedMemory

    MakePeer = Callable[..., Peer]
    MakeMemory = Callable[..., SharedMemory]
    MakeSender = Callable[..., Backend]

pytestmark = pytest.mark.nixl

MIB = 1 << 20
TCP = {"transports": "tcp", "devices": "lo"}


@pytest.fixture(scope="module")
def rig() -> Rig:
    """Whatever UCX chooses on one host: there it copies by itself."""
    return Rig("nixl")


def threaded(link: object) -> ThreadedLink:
    assert isinstance(link, ThreadedLink)
    return link


def threads_to(peer: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(f"to {peer}")]


# --- who gets them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        ("", True),
        ("all", True),
        ("tcp,cma", True),
        ("tcp,sm,self", True),
        ("^tcp", True),
        ("^cma", True),
        ("rc,cuda_copy,cuda_ipc", True),
        ("tcp", False),
        ("rc_x,tcp", False),
    ],
)
def test_which_transports_may_write_by_themselves(transports: str, *, expected: bool) -> None:
    """Told wrongly that they do not, a peer would take its memory for silent too soon."""
    assert Options(transports=transports).may_copy() is expected


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, 2),
        ({"threads_per_peer": 3}, 3),
        ({"threads_per_peer": 0}, 0),
        (TCP, 0),
        ({**TCP, "threads_per_peer": 1}, 1),
    ],
)
def test_who_gets_threads(options: dict[str, Any], threads: int, peer: Peer, make_memory: MakeMemory) -> None:
    ours = make_memory(MIB, seed=1)
    backend = NixlBackend("us", options)
    backend.start(sends=True)
    backend.register(ours.region)
    link = backend.connect("peer", peer.endpoint)
    try:
        assert isinstance(link, ThreadedLink if threads else NixlLink)
        assert len(threads_to("peer")) == threads
        until_done(link.write([whole(MIB)]))
    finally:
        backend.close()
    assert np.array_equal(peer.memory[0].bytes[:MIB], ours.bytes)
    assert threads_to("peer") == []


def test_what_was_opened_before_one_that_fails_is_fenced(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that cannot be made, and a host that has no more threads."""
    backend = make_sender(make_memory(MIB))
    assert isinstance(backend, NixlBackend)
    opened: list[NixlLink] = []
    real = NixlBackend._open

    def second_fails(self: NixlBackend, *arguments: Any) -> NixlLink:  # noqa: ANN401 - as the real one
        if opened:
            message = "no more agents"
            raise BackendError(message)
        opened.append(real(self, *arguments))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NixlBackend, "_open", second_fails)
        with pytest.raises(ConnectError, match="no more agents"):
            backend.connect("peer", peer.endpoint)
    assert [link.fenced for link in opened] == [True]

    def starts_one(self: threading.Thread) -> None:
        if threads_to("peer"):
            message = "can't start new thread"
            raise RuntimeError(message)
        start(self)

    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starts_one)
        with pytest.raises(ConnectError, match="can't start new thread"):
            backend.connect("peer", peer.endpoint)
    assert threads_to("peer") == []

    until_done(backend.connect("peer", peer.endpoint).write([whole(MIB)]))


# --- moving bytes ------------------------------------------------------------------------------


def test_large_writes_return_at_once(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    ours = make_memory(LARGE_BYTES, seed=1)
    link = make_sender(ours).connect("peer", peer.endpoint)
    until_done(link.write([whole(MIB)]))
    assert np.array_equal(peer.memory[0].bytes[:MIB], ours.bytes[:MIB])

    large = [link.write([whole(LARGE_BYTES)]) for _ in range(5)]

    assert {transfer.status for transfer in large} == {Status.MOVING}, "nobody has polled yet"
    for transfer in large:
        until_done(transfer)
    assert np.array_equal(peer.memory[0].bytes, ours.bytes)


def test_small_writes_do_without_a_free_agent(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """All are taken by large writes, so it waits for its turn."""
    ours = make_memory(LARGE_BYTES, seed=1)
    link = threaded(make_sender(ours).connect("peer", peer.endpoint))
    with link._links[0]._lock, link._links[1]._lock:
        large = [link.write([whole(LARGE_BYTES)]) for _ in range(2)]
        eventually(lambda: not link._free, PATIENCE_S, "both agents are taken")
        small = link.write([whole(MIB)])
        assert small.poll() is Status.MOVING
    for transfer in (*large, small):
        until_done(transfer)


def test_small_writes_wake_no_thread(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """One that is woken for nothing takes the interpreter from the owner."""
    link = threaded(make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint))
    waiters = link._changed._waiters  # type: ignore[attr-defined]
    eventually(lambda: len(waiters) == 2, PATIENCE_S, "both threads wait")
    asleep = list(waiters)
    for _ in range(20):
        until_done(link.write([whole(MIB)]))
    assert list(waiters) == asleep


def test_a_write_that_was_called_too_early_is_called_again(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Its thread woke up while its owner had the last agent, for a small write."""
    link = threaded(make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint))
    waiters = link._changed._waiters  # type: ignore[attr-defined]
    eventually(lambda: len(waiters) == 2, PATIENCE_S, "both threads wait")
    with link._changed:
        taken = [link._free.pop() for _ in range(2)]
    transfer = link.write([whole(LARGE_BYTES)])
    eventually(lambda: len(waiters) == 2, PATIENCE_S, "it has looked, and waits again")
    assert transfer.poll() is Status.MOVING
    for each in taken:
        link._give_back(each)
    until_done(transfer)


def test_a_transfer_that_another_thread_ends_is_not_taken_for_done() -> None:
    """That of an agent which finds its peer gone, right after it has told its owner that it moves."""

    class Ended(Transfer):
        def poll(self) -> Status:
            said = self.status
            self.error, self.status, self.settled = TransferError("gone"), Status.FAILED, True
            return said

    transfer = QueuedTransfer((), Ended())
    assert (transfer.poll(), transfer.settled) == (Status.FAILED, True)
    assert isinstance(transfer.error, TransferError)


# --- ends --------------------------------------------------------------------------------------


def test_after_a_fence_nothing_is_read(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Some writes are being copied, others wait; case C17."""
    peer, ours = make_peer(LARGE_BYTES), make_memory(LARGE_BYTES)
    ours.bytes[:] = 1
    backend = make_sender(ours)
    for number in range(5):
        link = backend.connect(f"peer-{number}", peer.endpoint)
        transfers = [link.write([whole(LARGE_BYTES)]) for _ in range(8)]

        link.fence()

        ours.bytes[:] = 0xFF
        assert all(transfer.settled for transfer in transfers)
        assert not (peer.memory[0].bytes == 0xFF).any()
        assert threads_to(f"peer-{number}") == []
        failed = [transfer for transfer in transfers if transfer.status is Status.FAILED]
        assert failed, "the last ones were still waiting"
        assert all(isinstance(transfer.error, PeerDisconnectedError) for transfer in failed)
        with pytest.raises(PeerDisconnectedError):
            link.write([whole(MIB)])
        link.fence()
        ours.bytes[:] = 1


def test_a_fence_does_not_wait_for_ever(
    peer: Peer, make_memory: MakeMemory, make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that does not return: nothing is said to be quiet; later it can be fenced."""
    monkeypatch.setattr(nixl_threads, "FENCE_WAIT_S", 0.1)
    link = threaded(make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint))
    with link._links[0]._lock, link._links[1]._lock:
        moving, also_moving, waiting = [link.write([whole(LARGE_BYTES)]) for _ in range(3)]
        eventually(lambda: not link._free, PATIENCE_S, "both threads are inside")
        with pytest.raises(BackendError, match="does not return"):
            link.fence()
        assert [link.fenced, moving.settled] == [False, False]
        assert (waiting.poll(), waiting.settled) == (Status.FAILED, True)
        with pytest.raises(PeerDisconnectedError):
            link.write([whole(MIB)])

    link.fence()

    assert [link.fenced, moving.settled, also_moving.settled] == [True, True, True]


def test_a_peer_that_dies_while_it_is_written(
    make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """Each write is done or has failed, and says so; case C10."""
    peer = make_peer(LARGE_BYTES)
    link = make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint)
    transfers = [link.write([whole(LARGE_BYTES)]) for _ in range(20)]
    until_done(transfers[0])

    peer.kill()

    statuses = [until_terminal(transfer) for transfer in transfers]
    assert statuses[-1] is Status.FAILED
    failed = [transfer for transfer in transfers if transfer.status is Status.FAILED]
    assert all(isinstance(transfer.error, PeerDisconnectedError) for transfer in failed)
    assert all(transfer.settled for transfer in transfers)
    with pytest.raises(PeerDisconnectedError):
        link.write([whole(MIB)])
    link.fence()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), TransferError("refused")], ids=repr)
def test_what_a_thread_meets_reaches_the_owner(
    error: Exception,
    peer: Peer,
    make_memory: MakeMemory,
    make_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no backend may raise ends the owner's thread as it would have without threads."""
    link = threaded(make_sender(make_memory(LARGE_BYTES)).connect("peer", peer.endpoint))

    def post(_: object) -> None:
        raise error

    for each in link._links:
        monkeypatch.setattr(each, "post", post)
    transfer = link.write([whole(LARGE_BYTES)])
    assert isinstance(transfer, QueuedTransfer)
    eventually(lambda: transfer.outcome is not None, PATIENCE_S, "a thread has had it")
    if isinstance(error, BackendError):
        assert (transfer.poll(), transfer.settled, transfer.error) == (Status.FAILED, True, error)
    else:
        with pytest.raises(ZeroDivisionError, match="a bug"):
            transfer.poll()
        assert not transfer.settled

    link.fence()

    assert (transfer.status, transfer.settled) == (Status.FAILED, True)
    assert isinstance(
        transfer.error, type(error) if isinstance(error, BackendError) else PeerDisconnectedError
    )


@pytest.mark.parametrize("how", ["not closed", "moving"])
def test_the_process_ends_in_good_order(how: str, peer: Peer, make_memory: MakeMemory) -> None:
    """Also while a thread is copying: one that came back into a dead interpreter would abort it."""
    ours = make_memory(LARGE_BYTES, seed=1)
    program = [sys.executable, "-m", "tests.backends.sender_program", "nixl", json.dumps({})]
    ended = subprocess.run(
        [*program, ours.path, str(LARGE_BYTES), peer.endpoint.hex(), how],
        cwd=ROOT,
        input="go\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout) == (0, "connected\nsent\n"), ended.stderr


FORKS = """
import os, sys, threading
from backends.registry import load
from tests.backends.memory import SharedMemory
backend = load("nixl")("us", {})
memory = SharedMemory(int(sys.argv[2]), sys.argv[1])
backend.start(sends=True)
backend.register(memory.region)
link = backend.connect("peer", bytes.fromhex(sys.argv[3]))
held, over = threading.Event(), threading.Event()
def hold():
    with link._changed:
        held.set()
        over.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    sys.exit(7)
_, status = os.waitpid(child, 0)
over.set()
backend.close()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_ends_in_good_order(peer: Peer, make_memory: MakeMemory) -> None:
    """It has none of the threads, and a lock that one of them held stays locked for ever."""
    ours = make_memory(MIB)
    ended = subprocess.run(
        [sys.executable, "-c", FORKS, ours.path, str(MIB), peer.endpoint.hex()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout) == (0, "7\n"), ended.stderr


def test_links_give_back_what_they_took(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Descriptors and threads, over links that were fenced with writes under way."""
    backend = make_sender(make_memory(LARGE_BYTES))

    def cycle() -> int:
        link = backend.connect("peer", peer.endpoint)
        for _ in range(4):
            link.write([whole(LARGE_BYTES)])
        link.fence()
        return open_files()

    cycle()
    before = cycle()
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir()))
    assert [cycle() for _ in range(5)] == [before] * 5
    # A thread that was joined may be the kernel's for a moment longer.
    eventually(lambda: len(list(tasks.iterdir())) <= threads, PATIENCE_S, "the threads are gone")


def test_a_fenced_link_is_forgotten(peer: Peer, make_memory: MakeMemory, make_sender: MakeSender) -> None:
    """Not even what runs at the end of the process keeps it."""
    backend = make_sender(make_memory(MIB))
    link = weakref.ref(backend.connect("peer", peer.endpoint))
    backend.close()
    gc.collect()
    assert link() is None


def test_a_lost_link_that_its_owner_does_not_fence_ends_with_the_backend(
    peer: Peer, make_peer: MakePeer, make_memory: MakeMemory, make_sender: MakeSender
) -> None:
    """All of its agents are gone already; another link is opened in between."""
    doomed = make_peer(LARGE_BYTES)
    backend = make_sender(make_memory(LARGE_BYTES))
    link = threaded(backend.connect("doomed", doomed.endpoint))
    with link._links[0]._lock, link._links[1]._lock:
        transfers = [link.write([whole(LARGE_BYTES)]) for _ in range(2)]
        eventually(lambda: not link._free, PATIENCE_S, "both threads are at it")
        doomed.kill()
    assert {until_terminal(transfer) for transfer in transfers} == {Status.FAILED}
    assert all(each.fenced for each in link._links)
    assert threads_to("doomed")
    backend.connect("peer", peer.endpoint)

    backend.close()

    assert threads_to("doomed") == []
