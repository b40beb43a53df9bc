"""Who else gets the lines of the log: followers over HTTP, a file that rotates, the last lines in memory.

All of them take JSON lines, whatever stdout shows, and none of them ever holds up whoever logs: each
has a bound, and counts what it had to drop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from coordinator.errors import ConfigError
from coordinator.log_writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Lines that wait for a follower; more are dropped, counted, and told to it.
MAX_WAITING: Final = 2_000
#: Lines that are kept to be shown later.
MAX_RECENT: Final = 1_000
#: A file that could not be set aside is written on for so long before that is tried again.
ROTATE_AGAIN_S: Final = 10.0


class Wanted:
    """Which lines somebody wants, by what stands in them."""

    def __init__(self, room: int | None = None, group: str = "") -> None:
        """Want the lines about a room, about a group (or a rank of it), or all."""
        self._room = () if room is None else (f'"room":{room},'.encode(), f'"room":{room}}}'.encode())
        self._group = (f'"{group}"'.encode(), f'"{group}/'.encode()) if group else ()

    def __call__(self, line: bytes) -> bool:
        """Whether a JSON line is wanted. A search in its bytes: decoding costs ten times as much."""
        return all(
            not needles or any(needle in line for needle in needles) for needles in (self._room, self._group)
        )


class Recent:
    """The last lines.

    Attributes:
        level: the least that it takes, as a number of the standard library.

    """

    def __init__(self, level: int) -> None:
        """Start empty."""
        self.level = level
        self._lines: deque[bytes] = deque(maxlen=MAX_RECENT)

    def put(self, line: bytes) -> None:
        """Keep a line, and let go of the oldest."""
        self._lines.append(line)

    def last(self, count: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
        """Return the last ``count`` lines that are wanted, the oldest first."""
        found: list[bytes] = []
        for line in reversed(self._lines):
            if len(found) == count:
                break
            if wanted(line):
                found.append(line)
        found.reverse()
        return found


class Follower:
    """A bounded queue of lines for one reader in the event loop; any thread may fill it.

    Attributes:
        level: the least that it takes, as a number of the standard library.
        dropped: lines that it lost because its reader was too slow, and has not been told of.

    """

    def __init__(self, level: int, wanted: Callable[[bytes], bool]) -> None:
        """Take the lines from ``level`` up that are ``wanted``."""
        self.level = level
        self.dropped = 0
        self._wanted = wanted
        self._lines: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._asleep = False
        self._loop = asyncio.get_running_loop()

    def put(self, line: bytes) -> None:
        """Queue a line if it is wanted, or drop it when the queue is full. Never waits."""
        if not self._wanted(line):
            return
        if len(self._lines) >= MAX_WAITING:
            self.dropped += 1
            return
        self._lines.append(line)
        if self._asleep:
            self._asleep = False
            self.wake()

    def wake(self) -> None:
        """Let ``wait`` return."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self, timeout_s: float) -> None:
        """Wait until there are lines, but at most so long."""
        if self._lines:
            return
        self._news.clear()
        self._asleep = True
        if self._lines:  # it came before the flag was seen
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return
        finally:
            self._asleep = False

    def take(self, most: int) -> tuple[list[bytes], int]:
        """Take up to so many lines, and how many were dropped since the last time."""
        lines = [self._lines.popleft() for _ in range(min(len(self._lines), most))]
        dropped, self.dropped = self.dropped, 0
        return lines, dropped


class FileWriter(Writer):
    """Writes lines to a file, in a thread of its own; a full file is set aside as ``FILE.1`` and so on.

    Attributes:
        level: the least that it takes, as a number of the standard library.

    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        count: int,
        level: int,
        tell_dropped: Callable[[int], bytes],
        tell: Callable[[str, Path, OSError], None],
    ) -> None:
        """Go on where the file ends; keep ``count`` files of ``max_bytes``.

        A file that cannot be set aside is written on, until it has as much as all of them may have. Then its
        lines are dropped. ``tell`` is called for either once until it can be, in the thread that writes: with
        the name of the event, the file, and why.

        Raises:
            ConfigError: the file cannot be written.

        """
        self.level = level
        self._path = path
        self._max_bytes = max_bytes
        self._count = count
        # With only one, a want that passes must not cost lines at once.
        self._most_bytes = max_bytes * max(count, 2)
        self._tell = tell
        # Why it cannot be set aside.
        self._problem: OSError | None = None
        self._told_full = False
        self._rotate_again_s = 0.0
        try:
            descriptor = self._open(path)
        except OSError as error:
            raise ConfigError([f"log.file: {path} cannot be written: {error.strerror}"]) from error
        self._size_bytes = os.fstat(descriptor).st_size
        try:
            super().__init__(descriptor, tell_dropped)
        finally:
            os.close(descriptor)

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _write(self, lines: list[bytes]) -> int:
        size_bytes = self._size_bytes + sum(map(len, lines))
        if self._size_bytes and size_bytes > self._max_bytes and time.monotonic() >= self._rotate_again_s:
            self._try_to_rotate()
        if self._problem is not None and size_bytes > self._most_bytes:
            if not self._told_full:
                self._told_full = True
                self._tell("log.file_full", self._path, self._problem)
            return 0
        written = super()._write(lines)
        self._size_bytes = os.fstat(self._descriptor).st_size
        return written

    def _try_to_rotate(self) -> None:
        try:
            self._rotate()
        except OSError as error:
            self._rotate_again_s = time.monotonic() + ROTATE_AGAIN_S
            if self._problem is None:
                self._tell("log.file_not_rotated", self._path, error)
            self._problem = error
        else:
            self._problem = None
            self._told_full = False

    def _rotate(self) -> None:
        """Set the file aside and go on in a new one.

        The new one is opened first, under another name: without it, nothing is renamed. One that is left of
        an attempt that failed is empty.
        """
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = self._open(new)
        try:
            self._set_aside()
            new.replace(self._path)
            os.dup2(descriptor, self._descriptor, inheritable=False)
        finally:
            os.close(descriptor)
        self._size_bytes = 0
        self._torn = False

    def _set_aside(self) -> None:
        """Give the files of today the next number each; the last one goes.

        Only as far as there is no gap: where a rename failed, the next attempt moves nothing twice.
        """
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._count))]
        free = next((number for number, name in enumerate(names) if not name.exists()), len(names) - 1)
        for number in range(free, 0, -1):
            names[number - 1].replace(names[number])
