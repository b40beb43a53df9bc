"""The worker as a process: ``python -m coordinator.worker``, settings on stdin.

The main thread runs the worker's loop (``coordinator.worker.loop``).

The end
    On ``Stop``, and when stdin ends (the parent is gone, or wants us to end), all links are fenced,
    within ``CLOSE_S``. The kernel kills us when the parent's thread that started us dies. In every
    case the process ends by ``os._exit``: native engines crash in the interpreter's own way out, and
    the end of the process is the strongest fence there is.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import select
import signal
import sys
import time
from typing import Final, NoReturn

import zmq

from backends import registry
from backends.base import BackendError
from coordinator import messages
from coordinator.errors import ConfigError, CoordinatorError, PoolBusyError, may_pass
from coordinator.messages import WorkerHello
from coordinator.worker.host import WorkerHost
from coordinator.worker.loop import MAX_COMMANDS_BYTES, ControlLoop, End
from coordinator.worker.memory import MappedPool
from coordinator.worker.outbox import Outbox
from coordinator.worker.places import RankPool
from coordinator.worker.settings import MAX_SETTINGS_BYTES, ExitCode, decode_settings

#: How long the parent may take to write the settings.
SETTINGS_S: Final = 30.0
#: How long fencing all links may take at the end.
CLOSE_S: Final = 1.0
_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Run a worker to its end, and end the process."""
    # Native libraries print to stdout; it is not theirs.
    os.dup2(_STDERR, _STDOUT)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    _die_with_parent()
    # A terminal's Ctrl-C goes to the whole process group; the coordinator then stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = _run()
    except Exception:  # noqa: BLE001 - the last door: it must end by _exit, and be heard
        _log.exception("the worker has crashed")
        code = ExitCode.CRASHED
    _exit(code)


def _run() -> ExitCode:
    """Run a worker; how it ended."""
    try:
        settings = decode_settings(_read_settings())
    except ConfigError as error:
        _log.error("%s", error)
        return ExitCode.SETTINGS
    outbox = Outbox()
    try:
        pool = MappedPool(settings.pool.path, settings.pool.size_bytes, settings.instance)
        ours = RankPool(settings.layout, settings.world_size, settings.rank, settings.pool.pages)
        # Started again, it must not be taken for its predecessor by a peer's engine.
        agent = f"{settings.label}-{secrets.token_hex(4)}"
        backend = registry.load(settings.backend)(agent, settings.options)
        host = WorkerHost(backend, ours, settings.budget, outbox.put, _lane_crashed)
        host.start([pool.region])
    except BackendError as error:
        _log.error("backend %s: %s", settings.backend, error)
        return ExitCode.BUSY if may_pass(error) else ExitCode.BACKEND
    except CoordinatorError as error:
        _log.error("%s", error)
        return ExitCode.BUSY if isinstance(error, PoolBusyError) or may_pass(error) else ExitCode.POOL
    hello = WorkerHello(
        messages.VERSION,
        bytes.fromhex(settings.token),
        os.getpid(),
        backend.capabilities.lands_after_settled,
    )
    line = _connect(settings.control)
    loop = ControlLoop(line, hello, host, outbox, settings.heartbeat_s)
    loop.listen(_STDIN, _stdin_ended)
    end = loop.run()
    line.close()
    try:
        host.close(CLOSE_S)
    except BackendError as error:
        _log.error("the backend cannot be closed: %s", error)
    return ExitCode.REFUSED if end is End.REFUSED else ExitCode.STOPPED


def _connect(address: str) -> zmq.Socket[bytes]:
    """Open the control socket."""
    line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    line.set(zmq.ROUTING_ID, secrets.token_bytes(16))
    line.set(zmq.LINGER, 0)
    line.set(zmq.IPV6, 1)
    line.set(zmq.MAXMSGSIZE, MAX_COMMANDS_BYTES)
    line.connect(address)
    return line


def _stdin_ended() -> bool:
    """Read stdin; whether that was its end."""
    if os.read(_STDIN, 4096):
        return False
    _log.info("stdin ended")
    return True


def _read_settings() -> bytes:
    """Read the line of settings from stdin.

    Raises:
        ConfigError: it does not come in time, is too long, or stdin ends before it does.

    """
    line = bytearray()
    deadline_s = time.monotonic() + SETTINGS_S
    problem = ""
    while not problem and not line.endswith(b"\n"):
        ready, _, _ = select.select([_STDIN], [], [], max(0.0, deadline_s - time.monotonic()))
        chunk = os.read(_STDIN, 65536) if ready else b""
        line += chunk
        if not ready:
            problem = f"not received within {SETTINGS_S:g} s"
        elif not chunk:
            problem = "stdin ended before the end of the line"
        elif len(line) > MAX_SETTINGS_BYTES:
            problem = f"longer than {MAX_SETTINGS_BYTES} bytes"
    if problem:
        raise ConfigError([f"worker settings: {problem}"])
    return bytes(line)


def _die_with_parent() -> None:
    """Have the kernel kill us when the thread that started us dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        _log.warning("PR_SET_PDEATHSIG: %s; only the end of stdin tells", os.strerror(ctypes.get_errno()))


def _lane_crashed() -> None:
    """End the process: a lane is in an unknown state, and only this makes its memory quiet."""
    _log.exception("a lane has crashed")
    _exit(ExitCode.CRASHED)


def _exit(code: ExitCode) -> NoReturn:
    logging.shutdown()
    os._exit(code)
