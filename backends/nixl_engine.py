"""NIXL's native bindings, tamed: found, loaded, its environment set, its errors made ours.

The bindings module is loaded by itself, without the Python package around it: that package
reconfigures logging for the whole process when imported (it closes existing handlers and prints to
stdout), and adds nothing that is needed here.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.base import BackendError, BackendUnavailableError, PeerDisconnectedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import TracebackType

    from backends.base import BlockIndex, Grid, Region

logger = logging.getLogger(__name__)

#: Packages that carry the bindings, in the order in which they are tried.
_PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
_PLUGIN: Final = "UCX"
_INFINIBAND: Final = Path("/sys/class/infiniband")

# What was set for the engine of this process; it reads its environment once.
_environment: dict[str, str] | None = None


def find_bindings() -> ModuleSpec:
    """Where the bindings are; nothing is loaded.

    Raises:
        ImportError: no NIXL package is installed.

    """
    for package in _PACKAGES:
        found = find_spec(package)
        if found is None or found.submodule_search_locations is None:
            continue
        bindings = PathFinder.find_spec(f"{package}._bindings", list(found.submodule_search_locations))
        if bindings is not None and bindings.loader is not None:
            return bindings
    message = f"no NIXL bindings are installed (looked for {', '.join(_PACKAGES)})"
    raise ImportError(message)


def load_bindings(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - the native module has no types
    """Set the engine's environment and load the bindings; the second call finds them loaded.

    Args:
        environment: variables that the options ask for. They are inherited by child processes.

    Raises:
        BackendError: another engine of this process was set up differently.
        BackendUnavailableError: the bindings cannot be loaded.

    """
    _set_environment(environment)
    for package in _PACKAGES:
        # Two variants in one process crash: take the one that is there.
        if f"{package}._bindings" in sys.modules:
            return sys.modules[f"{package}._bindings"]
    try:
        spec = find_bindings()
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except ImportError as error:
        message = f"the NIXL bindings cannot be loaded: {error}"
        raise BackendUnavailableError(message) from error
    logger.info("NIXL bindings loaded from %s", spec.origin)
    return module


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Set, once per process, what the options ask for and what keeps the engine well behaved."""
    global _environment  # noqa: PLW0603 - the native engine is as global as this
    if _environment is not None:
        if _environment != dict(wanted):
            message = f"this process already runs NIXL with {_environment}; {dict(wanted)} was asked for"
            raise BackendError(message)
        return
    os.environ.update(wanted)
    # Otherwise it takes SIGHUP over.
    os.environ["UCX_DEBUG_SIGNO"] = ""
    # Otherwise it prints to stdout.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # Every fence draws a warning for each request that it cut off.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if not _INFINIBAND.exists():
        # Its RDMA modules crash the process at exit where there is no device.
        os.environ.setdefault("UCX_MODULES", "^ib")
    _environment = dict(wanted)


class _Mapped:
    """See ``Agent.mapped``. A generator would cost twice as much, and a small write takes three of these."""

    __slots__ = ("_disconnect", "_error_type", "_errors", "_what")

    def __init__(
        self,
        errors: tuple[type[Exception], ...],
        disconnect: type[Exception],
        what: str,
        error_type: type[BackendError],
    ) -> None:
        self._errors = errors
        self._disconnect = disconnect
        self._what = what
        self._error_type = error_type

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._disconnect):
            message = f"{self._what}: the peer is gone ({error})"
            raise PeerDisconnectedError(message) from None
        if isinstance(error, self._errors):
            message = f"{self._what}: {error}"
            raise self._error_type(message) from None


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent is made.

    Attributes:
        bindings: what ``load_bindings`` returned.
        name: unique in the deployment.
        progress_delay_us: pause of its progress thread; ``None``: no such thread, its own calls
            make the progress.

    """

    bindings: Any
    name: str
    progress_delay_us: int | None


class Agent:
    """One native agent. Not thread-safe; destroying it is what makes its transfers quiet.

    Requests and prepared grids are opaque ints that live until ``destroy``.
    """

    def __init__(self, settings: AgentSettings) -> None:
        """Create it.

        Raises:
            BackendError: the engine cannot be set up with these settings on this host.

        """
        self._bindings = settings.bindings
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            *(
                value
                for key, value in vars(settings.bindings).items()
                if key.endswith("Error") and isinstance(value, type)
            ),
        )
        self._prepared: dict[tuple[str, Grid], int] = {}
        self._requests: set[int] = set()
        config = self._bindings.nixlAgentConfig()
        config.useListenThread = False
        config.useProgThread = settings.progress_delay_us is not None
        # At 0, the default of the Python package, the thread spins.
        config.pthrDelay = settings.progress_delay_us or 0
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_NONE
        with self.mapped("the engine cannot be set up; its own messages are on stderr"):
            self._native = self._bindings.nixlAgent(settings.name, config)
            self._plugin = self._native.createBackend(_PLUGIN, {})

    def mapped(self, what: str, error_type: type[BackendError] = BackendError) -> _Mapped:
        """Turn native exceptions into ``error_type``, or ``PeerDisconnectedError`` where it is one."""
        return _Mapped(self._errors, self._bindings.nixlRemoteDisconnectError, what, error_type)

    def _segment(self, memory: str) -> Any:  # noqa: ANN401 - a native enum
        """The native kind of ``"host"`` or ``"cuda"`` memory."""
        return self._bindings.DRAM_SEG if memory == "host" else self._bindings.VRAM_SEG

    def register(self, region: Region) -> None:
        """Register memory; it stays registered as long as the agent lives."""
        row = (region.address, region.size_bytes, region.device, "")
        rows = self._bindings.nixlRegDList(self._segment(region.memory), [row])
        with self.mapped(f"memory at {region.address:#x} cannot be registered"):
            self._native.registerMem(rows, [self._plugin])

    def metadata(self) -> bytes:
        """What another agent's ``add_peer`` takes."""
        with self.mapped("no metadata"):
            return bytes(self._native.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Learn how to reach another agent; returns its name."""
        with self.mapped("the peer's metadata cannot be used or it cannot be reached"):
            return str(self._native.loadRemoteMD(metadata).decode("utf-8", "replace"))

    def prepare(self, peer: str | None, region: Region, grid: Grid) -> int:
        """Prepare a checked grid in our memory (``peer`` is ``None``) or a peer's; kept for reuse."""
        key = (peer or "", grid)
        if key not in self._prepared:
            row = (
                region.address + grid.offset_bytes,
                grid.block_bytes,
                region.device,
                grid.stride_bytes,
                grid.count,
            )
            with self.mapped(f"{peer or 'our own agent'} has no such memory: {grid}"):
                self._prepared[key] = self._native.prepXferDlist(
                    self._bindings.NIXL_INIT_AGENT if peer is None else peer,
                    self._segment(region.memory),
                    np.array([row], np.uint64),
                    [self._plugin],
                )
        return self._prepared[key]

    def forget_prepared(self) -> None:
        """Release all prepared grids; no request may be outstanding."""
        with self.mapped("a prepared grid cannot be released"):
            for prepared in self._prepared.values():
                self._native.releasedDlistH(prepared)
        self._prepared.clear()

    @property
    def prepared_count(self) -> int:
        """Number of prepared grids."""
        return len(self._prepared)

    def make(self, source: int, source_blocks: BlockIndex, destination: int, blocks: BlockIndex) -> int:
        """Make a write request between prepared grids; nothing moves yet."""
        with self.mapped("the engine refused the write"):
            request = int(
                self._native.makeXferReq(
                    self._bindings.NIXL_WRITE,
                    source,
                    np.ascontiguousarray(source_blocks),
                    destination,
                    np.ascontiguousarray(blocks),
                    "",
                    [self._plugin],
                )
            )
        self._requests.add(request)
        return request

    def post(self, request: int) -> bool:
        """Start a request; true when it is done already. An error does not mean that nothing moved."""
        with self.mapped("the write failed when posted"):
            return bool(self._native.postXferReq(request, "") == self._bindings.NIXL_SUCCESS)

    def done(self, request: int) -> bool:
        """Make progress and ask after a posted request; an error is the end of it."""
        with self.mapped("the write failed"):
            return bool(self._native.getXferStatus(request) == self._bindings.NIXL_SUCCESS)

    def release(self, requests: Sequence[int]) -> None:
        """Give back requests that are done or were never posted.

        Never for one that moves: the engine would say yes, and go on moving it.
        """
        with self.mapped("a request cannot be released"):
            for request in requests:
                self._native.releaseXferReq(request)
                self._requests.discard(request)

    def destroy(self) -> None:
        """Destroy the native agent: on return it reads and writes nothing any more.

        Raises:
            BackendError: something still holds it.

        """
        if self._native is None:
            return
        try:
            # Releasing moving requests stops nothing; it only keeps them from leaking below.
            self.release(list(self._requests))
            self.forget_prepared()
        except BackendError as error:
            logger.warning("some memory leaks: %s", error)
        native, self._native = self._native, None
        # Only this frame and the call below may hold it, or it would live on.
        holders = sys.getrefcount(native)
        if holders > 2:  # noqa: PLR2004 - those two
            # Nor may the error hold it, through its traceback.
            self._native, native = native, None
            message = f"the engine cannot be destroyed: {holders - 2} others hold it"
            raise BackendError(message)
