"""A stdout that takes nothing costs lines, counted, and never the caller's time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from coordinator import log_writer
from coordinator.log_writer import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe that holds 64 KiB."""
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:  # the test has closed it itself
            continue


def tell(count: int) -> str:
    return f"dropped {count}"


def drain(reader: int) -> bytes:
    """Read what is there and what still comes until the writing end is closed."""
    data = b""
    while part := os.read(reader, 65536):
        data += part
    return data


def test_lines_come_out_in_order_and_all_of_them(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(drain(reader)))
    thread.start()
    for number in range(5000):
        writer.put(f"line {number}".encode())
    writer.close(5.0)
    thread.join(5.0)
    assert received[0].decode().splitlines() == [f"line {number}" for number in range(5000)]
    assert writer.dropped == 0


def test_lines_of_many_threads_are_whole(pipe: tuple[int, int]) -> None:
    """Case C40: no torn line."""
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    received: list[bytes] = []
    collector = threading.Thread(target=lambda: received.append(drain(reader)))
    collector.start()

    def put(number: int) -> None:
        for i in range(1000):
            writer.put(f"{number} {i} {'x' * 50}")

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(5.0)
    collector.join(5.0)
    lines = received[0].decode().splitlines()
    assert len(lines) == 8000
    assert sorted(lines) == sorted(f"{n} {i} {'x' * 50}" for n in range(8) for i in range(1000))


def test_a_blocked_stdout_costs_lines_and_not_time(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C14 for the log: whoever does not read is not waited for."""
    monkeypatch.setattr(log_writer, "MAX_LINES", 1000)
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    line = b"x" * 1000
    slowest_s = 0.0
    for _ in range(5000):
        started_s = time.perf_counter()
        writer.put(line)
        slowest_s = max(slowest_s, time.perf_counter() - started_s)
    assert writer.dropped > 3000
    assert slowest_s < 1.0  # a thread that waits for the pipe would wait for ever
    dropped = writer.dropped
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(drain(reader)))
    thread.start()
    writer.close(5.0)
    thread.join(5.0)
    lines = received[0].splitlines()
    assert lines.count(line) == 5000 - dropped
    assert f"dropped {dropped}".encode() in lines


def test_closing_does_not_wait_for_a_blocked_stdout(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    for _ in range(200):
        writer.put(b"x" * 1000)
    started_s = time.monotonic()
    writer.close(0.1)
    assert time.monotonic() - started_s < 2.0
    os.close(reader)  # now the thread can end


def test_a_reader_that_has_gone_is_survived_and_counted(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    os.close(reader)
    writer.put(b"into the void")
    eventually(lambda: writer.dropped, what="the line is counted")
    writer.put(b"and another")
    eventually(lambda: writer.dropped >= 2, what="the next line is counted")
    writer.close(1.0)


class Disk:
    """Stands in for ``os.write``: a disk that is full, except for a few bytes.

    Attributes:
        room_bytes: how much it still takes; None when it is not full.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes: int | None = 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room_bytes is None:
            return self._write(descriptor, data)
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(descriptor, data[: self.room_bytes])
        self.room_bytes -= count
        return count


def test_all_that_was_lost_is_told_also_what_was_lost_while_it_could_not_be_told(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, descriptor = pipe
    disk = Disk(monkeypatch)
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    for batch in range(1, 6):
        for _ in range(10):
            writer.put(b"lost")
        eventually(lambda: writer.dropped >= 10 * batch, what="they are counted")  # noqa: B023 - at once
    disk.room_bytes = None
    writer.put(b"there")
    writer.close(5.0)
    assert writer.dropped == 50
    assert drain(reader) == b"there\ndropped 50\n"


@pytest.mark.parametrize(("room_bytes", "kept"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 2), (12, 3), (15, 3)])
def test_of_what_is_written_in_part_only_what_is_not_there_is_lost(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, room_bytes: int, kept: int
) -> None:
    reader, descriptor = pipe
    monkeypatch.setattr(log_writer, "_BATCH", 4)
    monkeypatch.setattr(log_writer, "GATHER_S", 0.2)
    disk = Disk(monkeypatch)
    disk.room_bytes = room_bytes
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    four = [b"1234", b"56", b"789", b"abcd"]
    for line in four:
        writer.put(line)
    eventually(lambda: writer.dropped, what="the rest is counted")
    disk.room_bytes = None
    writer.put(b"there")
    writer.close(5.0)
    assert writer.dropped == 4 - kept
    whole = [line for line in drain(reader).splitlines() if line in four]
    assert whole == four[:kept]


def test_half_a_line_does_not_spoil_the_next_one(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, descriptor = pipe
    disk = Disk(monkeypatch)
    disk.room_bytes = len("whole\nha")
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    for line in (b"whole", b"half"):
        writer.put(line)
    eventually(lambda: writer.dropped, what="they are counted")
    disk.room_bytes = None
    writer.put(b"there")
    writer.close(5.0)
    assert drain(reader).splitlines() == [b"whole", b"ha", b"there", f"dropped {writer.dropped}".encode()]


def test_a_descriptor_that_does_not_wait_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    os.set_blocking(descriptor, False)  # as a terminal that another program has set so
    writer = Writer(descriptor, tell)
    os.close(descriptor)
    lines = [f"{number} {'x' * 1000}".encode() for number in range(500)]
    for line in lines:
        writer.put(line)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(drain(reader)))
    thread.start()
    writer.close(5.0)
    thread.join(5.0)
    assert received[0].splitlines() == lines


def test_a_writer_that_sleeps_wakes_for_a_line(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = Writer(descriptor, tell)
    for number in range(20):
        eventually(lambda: writer._asleep, what="the writer has nothing to do")
        writer.put(f"{number}".encode())
        assert os.read(reader, 100) == f"{number}\n".encode()
    writer.close(1.0)


def test_a_program_that_ends_has_written_its_last_line() -> None:
    code = (
        "from coordinator import logs; logs.configure('info', 'json'); log = logs.get_logger()\n"
        "for number in range(3000): log.info('last.words', number=number)\n"
        "raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == list(range(3000))


def test_a_line_costs_the_caller_microseconds() -> None:
    """The bound is ten times the figure of a quiet machine: it finds a lock or a write, not noise."""
    code = (
        "import sys, timeit; from coordinator import logs\n"
        "logs.configure('info', 'json', open('/dev/null', 'w')); log = logs.get_logger(group='prefill-0')\n"
        "call = lambda: log.info('handoff.opened', room=1, attempt=1, waited_s=0.1, size_bytes=4096)\n"
        "print(min(timeit.repeat(call, number=1000, repeat=7)) / 1000 * 1e6)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 50
