"""The worker as a process: ``python -m coordinator.worker``, settings on stdin.

The main thread owns the control socket and does nothing that blocks: it takes commands, hands on
reports and gives a sign of life. The backend's calls are made in the lanes' threads.

The end
    On ``Stop``, and when stdin ends (the parent is gone, or wants us to end), all links are fenced,
    within ``CLOSE_S``. The kernel kills us when the parent's thread that started us dies. In every
    case the process ends by ``os._exit``: native engines crash in the interpreter's own way out, and
    the end of the process is the strongest fence there is.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import secrets
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn

import zmq

from backends import registry
from backends.base import BackendError
from coordinator import messages
from coordinator.errors import ConfigError, CoordinatorError, PoolBusyError, ProtocolError
from coordinator.messages import Commands, Refused, Reports, Stop, WorkerHello
from coordinator.worker.host import WorkerHost
from coordinator.worker.memory import MappedPool
from coordinator.worker.outbox import Outbox
from coordinator.worker.places import RankPool
from coordinator.worker.settings import MAX_SETTINGS_BYTES, ExitCode, decode_settings

if TYPE_CHECKING:
    from coordinator.worker.settings import WorkerSettings

#: How long the parent may take to write the settings.
SETTINGS_S: Final = 30.0
#: How long fencing all links may take at the end.
CLOSE_S: Final = 1.0
#: Frames taken from the socket before reports are looked after.
_FRAMES_PER_TURN: Final = 64
#: Larger than any message with commands.
_MAX_COMMANDS_BYTES: Final = 64 << 20
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
        host.start(pool.region)
    except BackendError as error:
        _log.error("backend %s: %s", settings.backend, error)
        return ExitCode.BACKEND
    except PoolBusyError as error:
        _log.error("%s", error)
        return ExitCode.BUSY
    except CoordinatorError as error:
        _log.error("%s", error)
        return ExitCode.POOL
    hello = WorkerHello(
        messages.VERSION,
        bytes.fromhex(settings.token),
        os.getpid(),
        backend.capabilities.lands_after_settled,
    )
    code = ControlLoop(settings, hello, host, outbox).run()
    try:
        host.close(CLOSE_S)
    except BackendError as error:
        _log.error("the backend cannot be closed: %s", error)
    return code


class ControlLoop:
    """The main thread's loop: control socket, reports, stdin."""

    def __init__(
        self, settings: WorkerSettings, hello: WorkerHello, host: WorkerHost, outbox: Outbox
    ) -> None:
        """Open the socket; ``hello`` is the first message on it."""
        self._heartbeat_s = settings.heartbeat_s
        self._host = host
        self._outbox = outbox
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, secrets.token_bytes(16))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.MAXMSGSIZE, _MAX_COMMANDS_BYTES)
        self._socket.connect(settings.control)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(outbox.fileno(), zmq.POLLIN)
        self._poller.register(_STDIN, zmq.POLLIN)
        # A message that the socket did not take yet.
        self._pending = messages.encode(hello)
        self._ended: ExitCode | None = None
        self._sign_due_s = 0.0

    def run(self) -> ExitCode:
        """Serve until told to end; how it ended."""
        self._send()
        while self._ended is None:
            wait_s = max(0.0, self._sign_due_s - time.monotonic())
            events = dict(self._poller.poll(math.ceil(1000 * wait_s)))
            if self._socket in events:
                self._receive()
            if self._outbox.fileno() in events:
                self._outbox.rest()
            if _STDIN in events and not os.read(_STDIN, 4096):
                _log.info("stdin ended")
                self._ended = ExitCode.STOPPED
            self._send()
        self._socket.close()
        return self._ended

    def _receive(self) -> None:
        """Take what has arrived, within reason."""
        for _ in range(_FRAMES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._obey(frames)
            except ProtocolError as error:
                _log.error("ignored from the coordinator: %s", error)

    def _obey(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            message = f"a message of {len(frames)} frames"
            raise ProtocolError(message)
        match messages.decode_to_worker(frames[0]):
            case Commands(items=items):
                self._host.obey(items)
            case Refused(message=message):
                _log.error("refused by the coordinator: %s", message)
                self._ended = ExitCode.REFUSED
            case Stop():
                self._ended = ExitCode.STOPPED

    def _send(self) -> None:
        """Send reports, or a sign of life when one is due, as far as the socket takes them."""
        while True:
            if not self._pending:
                reports = self._outbox.take(messages.MAX_ITEMS)
                if not reports and time.monotonic() < self._sign_due_s:
                    return
                self._pending = messages.encode(Reports(reports))
            try:
                self._socket.send(self._pending, zmq.NOBLOCK)
            except zmq.Again:
                self._poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT)
                self._sign_due_s = time.monotonic() + self._heartbeat_s
                return
            self._poller.modify(self._socket, zmq.POLLIN)
            self._pending = b""
            self._sign_due_s = time.monotonic() + self._heartbeat_s


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
