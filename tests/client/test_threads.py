"""The background thread: many callers, waiting, its death, closing, forks."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import select
import threading
import time
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from coordinator.client import ClientSettings, KVPool, PrefillRank, RankState, iothread
from coordinator.client.inbox import Head
from coordinator.errors import ClosedError
from coordinator.messages import Open, Send, WorkerOrders, encode
from tests.client.peer import LAYOUT, Peer, drain_until, outcomes
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.client.conftest import Connect


def test_many_threads_say_much_and_no_frame_is_torn(peer: Peer, connect: Connect) -> None:
    """Case C40: 8 threads, 10,000 calls each."""
    rank = connect(peer.control, settings=ClientSettings(queue_items=80_000))
    rank.wait_ready(10)
    failures: list[BaseException] = []

    def say(thread: int) -> None:
        try:
            for number in range(10_000):
                rank.send(1 + thread, np.arange(number % 8), aux=number.to_bytes(4, "little"))
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=say, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    eventually(lambda: len(peer.items("prefill")) == 80_000, 60, "all items")
    assert peer.malformed == 0
    said: dict[int, int] = dict.fromkeys(range(1, 9), 0)
    for item in peer.items("prefill"):
        assert isinstance(item, Send)
        number = said[item.room]
        assert item.aux == number.to_bytes(4, "little")
        assert item.pages == np.arange(number % 8, dtype="<i4").tobytes()
        said[item.room] += 1


def test_every_call_wakes_the_thread(peer: Peer, connect: Connect) -> None:
    peer.heartbeat_s = 1000.0
    rank = connect(peer.control, settings=ClientSettings(away_after_s=1000.0, resend_after_s=1000.0))
    rank.wait_ready(10)
    # From here on nothing else would wake it.
    peer.drop = lambda _: True
    for number in range(1, 201):
        if number % 3:
            eventually(lambda: rank._io._sleeping, 10, "it sleeps")
        rank.open(number)
        eventually(lambda number=number: len(peer.items("prefill")) == number, 5, "heard")  # type: ignore[misc]


def test_an_engine_may_sleep_on_the_descriptor(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.drain()
    assert select.select([rank], [], [], 0)[0] == []
    peer.publish("prefill", *outcomes([1]))
    assert select.select([rank], [], [], 10)[0] == [rank]
    drain_until(rank, 1)
    # The head follows when all ranks have the event.
    eventually(lambda: Head.unpack(rank.head).number == 1, 10, "a stable head")
    rank.drain()
    assert select.select([rank], [], [], 0)[0] == []


def test_waiting_ends_when_the_time_is_over(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    rank.drain()
    assert rank.wait(0.01) is False


def test_the_death_of_the_thread_is_raised_from_every_call(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", *outcomes([1]))
    eventually(lambda: peer.acknowledged("prefill") == 1, 10, "the acknowledgement")
    # No call does this: an item that cannot be encoded.
    rank._io.say(Open(cast("int", object()), 0), 1, rank._lives.inbox)
    eventually(lambda: rank.state is RankState.CLOSED, 10, "the thread's death")
    # What had arrived before is a fact all the same.
    assert list(rank.drain()) == outcomes([1])
    for call in (rank.drain, lambda: rank.open(1), rank.refusals, lambda: rank.wait_ready(1)):
        with pytest.raises(ClosedError, match="the I/O thread of prefill/0 has died of") as caught:
            call()
        assert isinstance(caught.value.__cause__, TypeError)


def test_closing_sends_what_is_queued_and_says_goodbye(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    descriptors = open_files()
    for room in range(1, 3001):
        rank.open(room)
    rank.close()
    eventually(lambda: peer.byes == 1, 10, "the goodbye")
    assert len(peer.items("prefill")) == 3000
    assert rank.state is RankState.CLOSED
    with pytest.raises(ClosedError, match="prefill/0 was closed by its engine"):
        rank.open(1)
    with pytest.raises(ClosedError):
        rank.drain()
    rank.close()
    eventually(lambda: open_files() < descriptors, 10, "the sockets are closed")


def test_closing_without_a_coordinator_takes_no_time(short_dir: Path, connect: Connect) -> None:
    rank = connect(f"ipc://{short_dir}/nobody")
    for room in range(1, 5001):
        rank.open(room)
    before_s = time.monotonic()
    rank.close()
    assert time.monotonic() - before_s < 1
    assert not rank._io._thread.is_alive()


def test_closing_before_a_deaf_coordinator_takes_no_time(peer: Peer, connect: Connect) -> None:
    """Case C14: it is there, but reads nothing."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.deaf = True
    for room in range(1, 20_001):
        rank.send(room, [], aux=b"x" * 1000)
    before_s = time.monotonic()
    rank.close()
    assert time.monotonic() - before_s < 2


def test_a_rank_that_nobody_refers_to_says_goodbye(peer: Peer) -> None:
    with KVPool.allocate(LAYOUT, 4) as pool:
        rank = PrefillRank.connect(peer.control, group="g", rank=0, world_size=1, pool=pool)
        rank.wait_ready(10)
        del rank
        eventually(lambda: peer.byes == 1, 10, "the goodbye")


def test_a_client_that_is_part_of_a_cycle_says_goodbye(peer: Peer) -> None:
    """The garbage collector may find it in any thread, its own included; nobody waits for its worker then."""
    peer.worker = WorkerOrders(secrets.token_bytes(32), "g-0", "loopback", {}, 0.05)
    with KVPool.allocate(LAYOUT, 4) as pool:
        rank = PrefillRank.connect(peer.control, group="g", rank=0, world_size=1, pool=pool)
        rank.wait_ready(10)
        thread = rank._io._thread
        eventually(lambda: _runs("kv-worker-g/0"), 10, "its worker")
        rank.__dict__["cycle"] = rank
        collected: list[int] = []

        def collect(message: object) -> bytes:
            if threading.current_thread() is thread and not any(collected):
                collected.append(gc.collect())
            return encode(message)

        # Any other thread may find it first, whenever it happens to allocate.
        gc.disable()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(iothread, "encode", collect)
                del rank
                eventually(lambda: peer.byes == 1, 10, "the goodbye")
        finally:
            gc.enable()
        thread.join(10)
        assert any(collected)
        assert not thread.is_alive()
        eventually(lambda: not _runs("kv-worker-g/0"), 10, "the end of its worker")


def test_a_forked_child_is_told_to_connect_anew(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rank.open(1)
        except ClosedError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rank.open(2)
    eventually(lambda: peer.items("prefill") == [Open(2, 0)], 10, "the parent's item")


@pytest.mark.parametrize("how", ["closes", "drops it", "exits"])
def test_a_forked_child_that_ends_wakes_nobody_in_its_parent(peer: Peer, connect: Connect, how: str) -> None:
    """They have one eventfd: the parent's thread would be woken for ever, and its engine, too."""
    rank = connect(peer.control)
    rank.wait_ready(10)
    bell = rank.fileno()
    rank.drain()
    child = os.fork()
    if child == 0:
        try:
            if how == "closes":
                rank.close()
            elif how == "drops it":
                rank._close()
            else:
                atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    wake = rank._io._wake
    eventually(lambda: not _is_readable(wake.fileno()), 10, "its own rings are heard")
    assert not _is_readable(bell)
    peer.publish("prefill", *outcomes([1]))
    eventually(lambda: _is_readable(bell), 10, "the engine is woken for what comes")


def test_a_forked_child_that_drains_takes_no_wake_up_from_its_parent(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    bell = rank.fileno()
    rank.drain()
    peer.publish("prefill", *outcomes([1]))
    eventually(lambda: _is_readable(bell), 10, "the outcome")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rank.drain()
            rank.drain()
        except ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _is_readable(bell)
    assert [event.room for event in rank.drain()] == [1]


def _runs(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
