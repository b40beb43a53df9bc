"""Mooncake's native engine, tamed: found, loaded, its environment set, its hazards kept away.

What it does when called wrongly, or in another way than here (all of it was tried):
    - Any call on an engine that is not initialised crashes the process; an unknown metadata scheme
      aborts it. So an engine is initialised where it is made, with its peer-to-peer scheme.
    - A write of several pieces under one id lands some of them when another fails, and is told as
      ended when its first piece is. So an id has one piece.
    - Asking after an id once more after its end reads freed memory. ``Engine.ended`` must not be.
    - A piece that finds no connection free waits for one. When the peer dies meanwhile, the engine connects
      again for it, to whatever process listens there by then. So a link gives it one piece for each
      connection that it has. It then takes one that is free, without a look whether that is still good. All
      of this is on one thread, where a connection is free again before the next piece is looked at.
    - Some of its calls hold the interpreter during a remote call, some for a minute. None is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any, Final

from backends import mooncake_sockets as sockets
from backends.base import BackendError, BackendUnavailableError, InvalidTransferError
from backends.mooncake_sockets import EngineSockets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from importlib.machinery import ModuleSpec

    from backends.base import Region

logger = logging.getLogger(__name__)

#: Connections from one engine to another; with more it silently takes four.
LANES: Final = 16
_MODULE: Final = "mooncake.engine"
#: Two variants of one package.
_DISTRIBUTIONS: Final = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
#: What was tested, and whose source was read. Older ones report a write as done when it has only left for the
#: peer. Newer ones look, before a write, whether a free connection is still good, and if not make another,
#: to whatever process has the port by then. And they have several threads for their connections.
_TESTED: Final = ("0.3.13.post1",)
_LIBRARIES: Final = "libibverbs1 libnuma1 libcurl4"
#: Variables that change what this module relies on.
_FORBIDDEN: Final = {
    "MC_TCP_PROTO": "a write would be called done before it is in place",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "a link could follow a peer to its next incarnation",
    "MC_DISABLE_METACACHE": "each write would ask again where the peer is, and could find another process",
    "MC_LOG_DIR": "the engine aborts the process",
}
#: How long the engine's thread for handshakes sleeps, and so the most that ``destroy`` takes.
_ACCEPT_S: Final = 0.05
_OVERLAPS: Final = -7
_NATIVE_ERRORS: Final = (RuntimeError, TypeError, ValueError)

# One engine is set up at a time, so that its ports are known from others'.
_setting_up = threading.Lock()
# What was set for the engines of this process.
_environment: dict[str, str] | None = None


def find_engine() -> ModuleSpec:
    """Where the native module is; nothing is loaded.

    Raises:
        ImportError: Mooncake is not installed.

    """
    package = find_spec("mooncake")
    if package is not None and package.submodule_search_locations is not None:
        found = PathFinder.find_spec(_MODULE, list(package.submodule_search_locations))
        if found is not None and found.loader is not None:
            return found
    message = f"no Mooncake transfer engine is installed (looked for {_MODULE})"
    raise ImportError(message)


def load_engine(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - the native module has no types
    """Set the engine's environment and load its module; the second call finds it loaded.

    The module is loaded by itself: the package around it loads a store of many megabytes, too.

    Args:
        environment: variables that the options ask for. They are inherited by child processes.

    Raises:
        BackendError: another engine of this process was set up differently, or the environment has
            a variable with which no transfer would be safe.
        BackendUnavailableError: the module cannot be loaded, or is of another version.

    """
    _set_environment(environment)
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    _check_version()
    try:
        spec = find_engine()
        module = module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except ImportError as error:
        message = f"Mooncake's engine cannot be loaded: {error}; on Debian it needs {_LIBRARIES}"
        raise BackendUnavailableError(message) from error
    sys.modules[_MODULE] = module
    logger.info("Mooncake's engine loaded from %s", spec.origin)
    return module


def _check_version() -> None:
    """Refuse an engine of another version than this module was written for."""
    found = ""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = f"{name} {metadata.version(name)}"
    if found.partition(" ")[2] not in _TESTED:
        wanted = " or ".join(_TESTED)
        message = f"{found or 'an engine of unknown version'} was not shown to be safe; install {wanted}"
        raise BackendUnavailableError(message)


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Set, once per process, what the options ask for and what keeps the engine well behaved."""
    global _environment  # noqa: PLW0603 - the native engine is as global as this
    for name, why in _FORBIDDEN.items():
        if name in os.environ:
            message = f"the environment variable {name} must not be set: {why}"
            raise BackendError(message)
    if _environment is not None:
        if _environment != dict(wanted):
            message = f"this process already runs Mooncake with {_environment}; {dict(wanted)} was asked for"
            raise BackendError(message)
        return
    os.environ.update(wanted)
    os.environ["MC_TCP_LANES_PER_PEER"] = str(LANES)
    # Otherwise there would be a new connection for each piece.
    os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
    # What it logs goes to stderr; on other levels that is much.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    _environment = dict(wanted)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine is made.

    Attributes:
        module: what ``load_engine`` returned.
        host: the IPv4 address of this host under which peers reach it.
        protocol: ``"tcp"`` or ``"rdma"``.
        device: names of RDMA devices, separated by commas; empty: all.

    """

    module: Any
    host: str
    protocol: str
    device: str


class Engine:
    """One native engine. Not thread-safe; destroying it is what makes its writes quiet.

    Attributes:
        name: how other engines call it; an address.
        port: the port of that.

    """

    def __init__(self, settings: EngineSettings) -> None:
        """Create it.

        Raises:
            BackendError: it cannot be set up with these settings on this host.

        """
        with _setting_up:
            before = sockets.all_sockets()
            self._native: Any = _set_up(settings)
            self.port = int(self._native.get_rpc_port())
            self._sockets = EngineSockets(before, self.port) if settings.protocol == "tcp" else None
        self.name = f"{settings.host}:{self.port}"
        if self._sockets is not None:
            # ``destroy`` waits for the thread that waits for handshakes while it holds the interpreter:
            # measured, up to 1.0 s, in which all other links stand still; with this, up to ``_ACCEPT_S``.
            self._sockets.set_accept_timeout(_ACCEPT_S)
        # A call to itself ends the first sleep, which was begun before that; it also shows that
        # the address is one of ours.
        self.probe(self.name)

    def register(self, region: Region) -> None:
        """Register memory; it stays registered as long as the engine lives.

        Raises:
            InvalidTransferError: it overlaps what is registered.
            BackendError: the engine refused it for another reason.

        """
        what = f"memory at {region.address:#x} cannot be registered"
        with _mapped(what):
            code = self._living().register_memory(region.address, region.size_bytes)
        if code == _OVERLAPS:
            message = f"{what}: it overlaps another region"
            raise InvalidTransferError(message)
        if code != 0:
            message = f"{what} (error {code})"
            raise BackendError(message)

    def probe(self, name: str) -> None:
        """Call another engine, and wait for its answer.

        Raises:
            BackendError: it does not answer. This may take a minute when its process is stopped.

        """
        with _mapped(f"the engine at {name} cannot be called"):
            code = self._living().send_probe(name)
        if code != 0:
            message = f"the engine at {name} does not answer (error {code})"
            raise BackendError(message)

    def submit(self, name: str, source: int, destination: int, size_bytes: int) -> int:
        """Start a write of one checked piece; returns an id.

        The first one towards a peer waits for its handshake.

        Raises:
            BackendError: the engine refused it. Nothing was posted.

        """
        # Not ``_mapped``, nor below: for small pieces, a context manager is a third of all the work.
        try:
            number = int(self._living().transfer_submit_write(name, source, destination, size_bytes))
        except _NATIVE_ERRORS as error:
            message = f"the engine refused the write: {error}"
            raise BackendError(message) from None
        # Zero is what it returns when it cannot find the peer.
        if number <= 0:
            message = f"the engine refused the write (error {number})"
            raise BackendError(message)
        return number

    def submit_read(self, name: str, destination: int, source: int, size_bytes: int) -> int:
        """Start to read from a peer's registered memory; as ``submit``."""
        what = "the engine refused the read"
        with _mapped(what):
            number = int(
                self._living().batch_transfer_async_read(name, [destination], [source], [size_bytes])
            )
        if number <= 0:
            message = f"{what} (error {number})"
            raise BackendError(message)
        return number

    @property
    def data_port(self) -> int:
        """Where others' connections end; 0 with RDMA."""
        return self._sockets.data_port if self._sockets is not None else 0

    def connections(self, host: str, data_port: int) -> int:
        """Count its connections to the engine that takes data there, and have them kept alive.

        Raises:
            BackendError: no file can be opened to look.

        """
        self._living()
        made = self._sockets.connections(host, data_port) if self._sockets is not None else []
        for connection in made:
            sockets.keep_alive(connection)
        return len(made)

    def ended(self, numbers: Iterable[int]) -> list[tuple[int, bool]]:
        """Which of some ids have ended, and whether that is done: told once, and never to be asked again.

        An id that has ended either way does not read its source any more.

        Raises:
            BackendError: the engine does not know. None of the ids has been told as ended.

        """
        # One call for all ids and no wrapper for each: with small pieces, that is a third of all the work.
        check = self._living().transfer_check_status
        ends: list[tuple[int, bool]] = []
        try:
            for number in numbers:
                code = check(number)
                if code != 0:
                    ends.append((number, code > 0))
        except _NATIVE_ERRORS as error:
            # What has ended must be told; the next call comes to this one again.
            if not ends:
                message = f"the engine cannot say what became of a write: {error}"
                raise BackendError(message) from None
        return ends

    def _living(self) -> Any:  # noqa: ANN401 - the native module has no types
        """The native engine; not after its end, when an abandoned first contact may still ask for it."""
        if self._native is None:
            message = "the engine is destroyed"
            raise BackendError(message)
        return self._native

    def destroy(self) -> None:
        """Destroy the native engine: on return it reads and writes nothing any more.

        It takes up to ``_ACCEPT_S``, in which no other thread of the interpreter runs.

        Raises:
            BackendError: something still holds it.

        """
        native, self._native = self._native, None
        # Only this frame and the call below may hold it, or it would live on.
        holders = sys.getrefcount(native)
        if native is not None and holders > 2:  # noqa: PLR2004 - those two
            # Nor may the error hold it, through its traceback.
            self._native, native = native, None
            message = f"the engine cannot be destroyed: {holders - 2} others hold it"
            raise BackendError(message)


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Turn native exceptions into ours."""
    try:
        yield
    except _NATIVE_ERRORS as error:
        message = f"{what}: {error}"
        raise BackendError(message) from None


def _set_up(settings: EngineSettings) -> Any:  # noqa: ANN401 - the native module has no types
    """Make and initialise a native engine."""
    what = "the engine cannot be set up; its own messages are on stderr"
    with _mapped(what):
        native = settings.module.TransferEngine()
        code = native.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device)
    if code != 0:
        # Every other call would crash now.
        message = f"{what} (error {code})"
        raise BackendError(message)
    return native
