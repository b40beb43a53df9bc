"""A process that has loaded what ranks need and forks them: loading it takes up to some seconds.

``python -m coordinator.sim.forkserver PARENT`` reads a ``Fork`` a line from stdin and writes lines of
``Forked`` and ``Ended`` to stdout. Ranks end when it ends; it ends with stdin and with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec

import coordinator.sim.rank  # noqa: F401 - what ranks need is loaded once, here
from coordinator.sim import leash
from coordinator.sim.settings import Ended, Fork, Forked

_CRASHED: Final = 70
_READ_BYTES: Final = 1 << 16


def main() -> None:
    """Fork and reap until stdin is closed."""
    leash.follow(int(sys.argv[1]))
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, _READ_BYTES)
            _reap()
        if 0 in ready:
            read = os.read(0, _READ_BYTES)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                _say(Forked(_fork(msgspec.json.decode(line, type=Fork))))


def _fork(fork: Fork) -> int:
    if fork.settings.private:
        import_module("torch")  # for all that come after it
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = _CRASHED
    try:
        leash.follow(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        _redirect(fork.log)
        os.environ.clear()
        os.environ.update(fork.environment)
        code = import_module(fork.settings.program).run(fork.settings)
    except BaseException:  # noqa: BLE001 - the door of the rank: it must not go on as its parent
        traceback.print_exc()
    finally:
        # Exit handlers are the parent's, and native libraries are known to crash in theirs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    with Path(log).open("ab") as output, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(Ended(pid, os.waitstatus_to_exitcode(status)))


def _say(what: Forked | Ended) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


if __name__ == "__main__":
    main()
