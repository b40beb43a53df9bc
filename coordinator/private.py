"""A directory that only we can enter, for the socket on which our workers find us.

It is locked as long as its owner lives, so the next coordinator can tell what one that was killed
has left behind, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from coordinator.errors import ConfigError

_PREFIX: Final = "kv-coordinator-"


class PrivateDirectory:
    """A fresh directory with mode 0700; ``remove`` it at the end.

    Attributes:
        path: where it is.

    """

    def __init__(self) -> None:
        """Make it, and remove those of coordinators that are dead.

        Raises:
            ConfigError: it cannot be made, or locked.

        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        except OSError as error:
            problem = f"TMPDIR: cannot make a directory for the workers' socket: {error}"
            raise ConfigError([problem]) from error
        self._lock = _locked(self.path)
        if self._lock is None:
            self.remove()
            raise ConfigError([f"TMPDIR: {self.path}, for the workers' socket, cannot be locked"])
        for path in self.path.parent.glob(f"{_PREFIX}*"):
            _remove_if_dead(path)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """Lock a directory; None when its owner lives, or it is none of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_dead(path: Path) -> None:
    # One that has no socket yet was made a moment ago, and is about to be locked.
    try:
        if not (path / "workers").is_socket():
            return
    except PermissionError:
        return  # Another user's.
    descriptor = _locked(path)
    if descriptor is None:
        return
    if os.fstat(descriptor).st_uid == os.geteuid():
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
