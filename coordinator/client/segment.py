"""A file in ``/dev/shm`` that is gone when its owner is, however that ended.

A janitor, a tiny process of its own, waits on a pipe that only the owner can write to. When the
kernel closes the pipe because the owner was killed, the janitor removes the file. It is no child of the
owner: engines are often killed together with all their descendants.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO, Final

from coordinator.errors import PoolError
from coordinator.worker.settings import new_pool_path

#: A byte on the pipe: the owner has removed the file itself. End of file: the owner is dead.
#: The signals that ask a whole container to stop come to the janitor before the owner is gone; it
#: says when they cannot harm it any more.
_JANITOR: Final = """
import os, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
if not os.read(0, 1):
    try:
        os.unlink(sys.argv[1])
    except OSError:
        pass
"""
_JANITOR_START_S: Final = 30.0
_JANITOR_EXIT_S: Final = 5.0

_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment:
    """Shared memory of this process, zero at first, mapped for reading and writing.

    Attributes:
        path: the file behind it; its name is random.
        memory: the mapping; it stays valid for as long as something refers to it.

    """

    def __init__(self, size_bytes: int) -> None:
        """Create the file and give it its memory at once.

        Raises:
            PoolError: there is not that much memory, or the file or the janitor cannot be made.

        """
        self.path = new_pool_path()
        _check_space(self.path, size_bytes)
        self._owner = os.getpid()
        # The janitor comes first: there is no moment in which the file has nobody to remove it.
        self._janitor = Janitor(self.path)
        self._remove = weakref.finalize(self, _remove, self.path, self._janitor, self._owner)
        _segments.add(self)
        try:
            self.memory = _create(self.path, size_bytes)
        except PoolError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the file; whoever has it mapped keeps the memory. Calling it twice is fine."""
        self._remove()

    def disown(self) -> None:
        """In a forked child: the file and its janitor are the parent's alone."""
        self._remove.detach()
        self._janitor.disown()


def _disown_all() -> None:
    for segment in list(_segments):
        segment.disown()


# A child that held the pipe open would keep the file alive after its parent was killed.
os.register_at_fork(after_in_child=_disown_all)


def _check_space(path: str, size_bytes: int) -> None:
    """Refuse what does not fit, while that is still an error and not a SIGBUS in mid-write."""
    directory = str(Path(path).parent)
    try:
        space = os.statvfs(directory)
    except OSError as error:
        message = f"{directory} cannot be used for a pool: {error.strerror}"
        raise PoolError(message) from error
    free_bytes = space.f_bavail * space.f_frsize
    if size_bytes > free_bytes:
        message = (
            f"a pool of {size_bytes} bytes does not fit into {directory}, where {free_bytes} bytes are "
            f"free: allocate fewer pages, or enlarge it (for a container: --shm-size)"
        )
        raise PoolError(message)


class Janitor:
    """The process that removes a file when its owner is gone.

    Attributes:
        pid: its number.

    """

    def __init__(self, path: str) -> None:
        """Start it.

        Raises:
            PoolError: it does not start.

        """
        if not sys.executable:
            message = "no pool without a Python interpreter to watch over its file: sys.executable is empty"
            raise PoolError(message)
        try:
            starter = subprocess.Popen(  # noqa: S603 - our own interpreter and our own text
                # Isolated and without site: it must start fast and run nothing of the engine's environment.
                [sys.executable, "-I", "-S", "-c", _JANITOR, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # A key press or a signal to the owner's process group must not end it.
                start_new_session=True,
            )
        except OSError as error:
            message = f"the process that watches over {path} cannot be started: {error}"
            raise PoolError(message) from error
        assert starter.stdin is not None  # noqa: S101 - it is a pipe, see above
        assert starter.stdout is not None  # noqa: S101 - as above
        self._line, self._end = starter.stdin, starter.stdout
        ready = _is_readable(self._end, _JANITOR_START_S) and self._end.readline()
        if not ready:
            starter.kill()
        starter.wait()
        if not ready:
            self.disown()
            message = f"the process that watches over {path} ({sys.executable}) does not start"
            raise PoolError(message)
        self.pid = int(ready)

    def dismiss(self) -> None:
        """Send it home and wait until it has gone."""
        # It may have been killed; then it has nothing left to do.
        with contextlib.suppress(BrokenPipeError), self._line:
            self._line.write(b"x")
        # Its end of the pipe is closed when it ends.
        if not _is_readable(self._end, _JANITOR_EXIT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._end.close()

    def disown(self) -> None:
        """Leave it to somebody else."""
        self._line.close()
        self._end.close()


def _is_readable(pipe: IO[bytes], timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end is closed."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _create(path: str, size_bytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        message = f"{path} of {size_bytes} bytes cannot be created: {error}"
        raise PoolError(message) from error


def _remove(path: str, janitor: Janitor, owner: int) -> None:
    if os.getpid() == owner:
        Path(path).unlink(missing_ok=True)
        janitor.dismiss()
