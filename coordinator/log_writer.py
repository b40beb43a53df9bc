"""The thread behind the log: takes lines from a bounded queue and writes them to a descriptor.

Whoever logs never waits for stdout: a terminal on hold or a stuck log collector costs lines, counted,
and never the event loop.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

#: Lines that may wait for stdout; about as many as a busy coordinator logs in a second.
MAX_LINES: Final = 20_000
#: The thread lets lines gather for this long before it writes: one write instead of one for each line,
#: and it does not fight with the loop's thread for the interpreter at every line.
GATHER_S: Final = 0.02
#: Lines in one write; when so many wait, no more are waited for.
_BATCH: Final = 256


class DirectWriter:
    """Writes each line at once, in the caller's thread; for the time before and after the real log."""

    def __init__(self, descriptor: int) -> None:
        """Write to ``descriptor``."""
        self._descriptor = descriptor
        self.dropped = 0

    def put(self, line: bytes | str) -> None:
        """Write a line."""
        data = _with_end(line)
        try:
            whole = os.write(self._descriptor, data) == len(data)
        except OSError:
            whole = False
        self.dropped += not whole

    @property
    def alive(self) -> bool:
        """There is no thread that could die."""
        return True

    def close(self, timeout_s: float) -> None:
        """Do nothing: there is no queue."""


class Writer:
    """A bounded queue of lines and the thread that writes them."""

    def __init__(self, descriptor: int, tell_dropped: Callable[[int], bytes | str]) -> None:
        """Write to a copy of ``descriptor``.

        Args:
            descriptor: it may be closed later; the copy stays open until ``close``.
            tell_dropped: makes the line that says how many were dropped.

        """
        self._descriptor = os.dup(descriptor)
        self._tell_dropped = tell_dropped
        # Whether what was written last ends within a line.
        self._torn = False
        self._lines: deque[bytes | str] = deque()
        self._asleep = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._counting = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: bytes | str) -> None:
        """Queue a line, or drop and count it when the queue is full. Never waits."""
        if len(self._lines) >= MAX_LINES:
            self._drop(1)
            return
        self._lines.append(line)
        if self._asleep:
            # Once is enough: until the thread runs, every further line would pay for it again.
            self._asleep = False
            self._wake.set()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``, and end the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _drop(self, count: int) -> None:
        with self._counting:
            self.dropped += count

    def _run(self) -> None:
        told = 0
        while self._gather():
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), _BATCH))]
            dropped = self.dropped
            news = [self._tell_dropped(dropped - told)] if dropped > told else []
            written = self._write([_with_end(line) for line in (*lines, *news)])
            if written == len(lines) + len(news):
                told = dropped
            else:
                # What was to be told is no line that is lost: it is told next time.
                self._drop(len(lines) - written)
        os.close(self._descriptor)

    def _gather(self) -> bool:
        """Wait for lines; False at the end."""
        if len(self._lines) >= _BATCH:
            return True
        self._asleep = not self._lines
        # A line that came before the flag was seen has set no wake: look again before sleeping.
        while not self._lines and not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
        self._asleep = False
        self._closing.wait(GATHER_S)
        return bool(self._lines)

    def _write(self, lines: list[bytes]) -> int:
        """Write lines with their ends; how many are there: fewer when the descriptor takes no more."""
        # Half a line would spoil the next one as well.
        start = b"\n" if self._torn else b""
        rest = memoryview(start + b"".join(lines))
        end = len(rest)
        while rest:
            try:
                count = os.write(self._descriptor, rest)
            except BlockingIOError:
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                # The reader is gone or the disk is full. The next batch tries again.
                time.sleep(GATHER_S)
                break
            else:
                self._torn = rest[count - 1] != ord("\n")
                rest = rest[count:]
        written = end - len(rest) - len(start)
        # One that lacks nothing but its end gets that with the next one.
        return sum(whole - 1 <= written for whole in accumulate(map(len, lines)))


def _with_end(line: bytes | str) -> bytes:
    data = line if isinstance(line, bytes) else line.encode("utf-8", "backslashreplace")
    return data + b"\n"
