"""The socket files on which a coordinator listens: each is one coordinator's, as long as that lives.

libzmq replaces whatever is at the path that it is to bind. At its end it removes, in a thread of its own and
perhaps late, whatever is there by then. So of two coordinators each could take the other's socket away. Here
we bind it ourselves, libzmq only listens; and a lock on a file beside it, which the kernel drops with its
holder, says whose it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from typing import TYPE_CHECKING

from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class SocketFile:
    """A socket file of ours; ``remove`` it at the end.

    Attributes:
        listener: for libzmq, which closes it: ``detach`` it then.

    """

    def __init__(self, path: Path, key: str) -> None:
        """Make it, for our user alone, and its directory.

        Raises:
            ConfigError: it cannot be made, or is another coordinator's; ``key`` names the setting.

        """
        self._path = path
        self._lock_path = path.with_name(f"{path.name}.lock")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                [f"{key}: cannot make the directory {path.parent}: {error.strerror}"]
            ) from error
        try:
            self._lock = _lock(self._lock_path)
            try:
                self.listener = self._listen(key)
            except (OSError, ConfigError):
                self._unlock()
                raise
        except BlockingIOError as error:
            raise ConfigError([f"{key}: another process listens on {path} already"]) from error
        except OSError as error:
            # A path that is too long has no errno.
            raise ConfigError([f"{key}: {path} cannot be used: {error.strerror or error}"]) from error

    def remove(self) -> None:
        """Remove it. It may be another coordinator's from now on."""
        self._path.unlink(missing_ok=True)
        self._unlock()

    def _listen(self, key: str) -> socket.socket:
        """Take the place of a socket that nobody uses any more, if there is one."""
        path = self._path
        if path.exists() and not path.is_socket():
            raise ConfigError([f"{key}: {path} is there and is no socket; it would be removed"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            problem = probe.connect_ex(str(path))
        if problem in {errno.EACCES, errno.EPERM}:
            why = f"{path} belongs to another user, and cannot be used: {os.strerror(problem)}"
            raise ConfigError([f"{key}: {why}"])
        if problem not in {errno.ENOENT, errno.ECONNREFUSED}:
            # Of a process that knows nothing of our lock.
            raise ConfigError([f"{key}: another process listens on {path} already"])
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o077)
        try:
            listener.bind(str(path))
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)  # noqa: FBT003 - its only argument
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(mask)
        return listener

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def _lock(path: Path) -> int:
    """Lock a file that nobody but a coordinator uses, and that its holder removes at the end.

    Raises:
        BlockingIOError: another one has it.
        OSError: it cannot be made.

    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # It was removed before we had it; so it was if it is another one by now.
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
