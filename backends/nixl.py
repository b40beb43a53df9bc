"""The ``nixl`` backend: NIXL with its UCX plugin (RDMA, TCP, shared memory on one host).

Engines
    The receiving side has one native agent, with a progress thread. The sending side has one agent
    *per link*, without such a thread: ``Transfer.poll`` makes the progress, an idle link costs
    nothing, and destroying that agent, which is the only way to stop NIXL, touches no other link.

Settled
    NIXL cannot cancel: a released request goes on, an error does not mean that nothing moves. So a
    transfer settles when it is done or its agent is destroyed. When the peer is lost the link is
    dead anyhow, and fences itself at once. After any other error only ``fence`` settles the transfer.

Sizes
    NIXL does not check that memory is really there, nor zero lengths; all of it is checked before.

Options (see ``Options``) become environment variables of the process, before the engine is loaded.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import zlib
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from backends.base import (
    Backend,
    BackendError,
    Capabilities,
    ConnectError,
    Grid,
    Link,
    PeerDisconnectedError,
    Region,
    Status,
    Transfer,
    TransferError,
)
from backends.descriptors import check_parts
from backends.memory import check_region
from backends.nixl_engine import Agent, AgentSettings, find_bindings, load_bindings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import BlockIndex, Part

logger = logging.getLogger(__name__)

# Importing this module says whether NIXL is installed, without loading it.
find_bindings()

_PROBE_BYTES: Final = 8
_PROBE_POLL_S: Final = 0.0002
_PROBE_GRID: Final = Grid(0, 0, _PROBE_BYTES, _PROBE_BYTES, 1)
_FENCE_WAIT_S: Final = 5.0
_MAX_PREPARED: Final = 128


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the nixl backend.

    Attributes:
        transports: what UCX may use, as in its ``UCX_TLS``, for example ``"tcp"`` or ``"rc,cuda_copy"``;
            empty leaves the choice to it.
        devices: network devices, as in ``UCX_NET_DEVICES``, for example ``"eth0"`` or ``"mlx5_0:1"``.
        tcp_user_timeout_s: after how long a peer that acknowledges nothing counts as lost, over TCP;
            0 leaves it to the kernel (many minutes).
        progress_delay_us: pause of the receiving agent's progress thread; shorter costs CPU.
        connect_timeout_s: how long ``connect`` waits for the peer's engine to answer.

    """

    transports: Annotated[str, Meta(pattern=r"^\^?[A-Za-z0-9_,:]*$")] = ""
    devices: Annotated[str, Meta(pattern=r"^\^?[A-Za-z0-9_,:.-]*$")] = ""
    tcp_user_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 15.0
    progress_delay_us: Annotated[int, Meta(ge=100, le=1_000_000)] = 1000
    connect_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0

    def environment(self) -> dict[str, str]:
        """The variables that say the same to UCX."""
        wanted = {"UCX_TLS": self.transports, "UCX_NET_DEVICES": self.devices}
        if self.tcp_user_timeout_s:
            wanted["UCX_TCP_USER_TIMEOUT"] = f"{self.tcp_user_timeout_s * 1000:.0f}ms"
        return {name: value for name, value in wanted.items() if value}


class _RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer addresses it."""

    address: Annotated[int, Meta(ge=1)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]
    memory: Literal["host", "cuda"]
    device: Annotated[int, Meta(ge=0, le=1024)]


class _Endpoint(Struct, frozen=True, array_like=True, tag="nixl", forbid_unknown_fields=True):
    """What ``endpoint()`` returns, as msgpack.

    Attributes:
        agent: the backend's name.
        metadata: of the receiving agent; opaque, and parsed by native code.
        metadata_crc: of ``metadata``, so that native code never parses a damaged one.
        regions: in the order of their registration.
        probe: a scrap of memory into which a new link writes to see that the peer answers.

    """

    agent: Annotated[str, Meta(max_length=255)]
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    metadata_crc: int
    regions: Annotated[tuple[_RemoteRegion, ...], Meta(max_length=4096)]
    probe: _RemoteRegion


class NixlTransfer(Transfer):
    """A write: one native request for each pair of grids."""

    __slots__ = ("_link", "requests")

    def __init__(self, link: NixlLink, requests: list[int]) -> None:
        """Nothing is posted yet."""
        super().__init__()
        self._link = link
        # Those that still move; empty when settled.
        self.requests = requests

    def poll(self) -> Status:
        """See ``Transfer.poll``."""
        if not self.settled:
            self._link.advance(self)
        return self.status

    def end(self, error: BackendError | None) -> None:
        """Nothing moves any more: done, or failed with ``error`` unless it had failed before."""
        if error is not None and self.error is None:
            self.error = error
        self.status = Status.DONE if self.error is None else Status.FAILED
        self.settled = True
        self.requests = []

    def fail(self, error: BackendError) -> None:
        """It failed, and something may still move."""
        self.error, self.status = error, Status.FAILED


class NixlLink(Link):
    """An agent of its own, towards one peer."""

    def __init__(self, peer: str, agent: Agent, local: Sequence[Region], remote: _Endpoint) -> None:
        """Learn the peer; ``local`` is registered with ``agent`` already.

        Raises:
            BackendError: the peer cannot be reached or does not know its own endpoint.

        """
        self.peer = peer
        self._agent = agent
        self._local = list(local)
        self._local_bytes = [region.size_bytes for region in local]
        self._remote = [_as_region(region) for region in remote.regions]
        self._remote_bytes = [region.size_bytes for region in self._remote]
        self._moving: set[NixlTransfer] = set()
        self._lock = threading.Lock()
        self.fenced = False
        self._remote_agent = agent.add_peer(remote.metadata)

    def probe(self, scrap: Region, remote: Region, timeout_s: float) -> None:
        """Write a few bytes where nothing depends on them, and wait for the peer's engine.

        Raises:
            BackendError: it is gone or does not answer.

        """
        one = np.zeros(1, np.int32)
        source = self._agent.prepare(None, scrap, _PROBE_GRID)
        destination = self._agent.prepare(self._remote_agent, remote, _PROBE_GRID)
        request = self._agent.make(source, one, destination, one)
        end_s = time.monotonic() + timeout_s
        done = self._agent.post(request)
        while not done:
            if time.monotonic() > end_s:
                message = f"its engine did not answer within {timeout_s:g} s"
                raise BackendError(message)
            time.sleep(_PROBE_POLL_S)
            done = self._agent.done(request)
        self._agent.release([request])
        self._agent.forget_prepared()

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        check_parts(parts, self._local_bytes, self._remote_bytes)
        with self._lock:
            if self.fenced:
                message = f"the link to {self.peer} was fenced or its peer is gone; connect anew"
                raise PeerDisconnectedError(message)
            if len(self._moving) >= NixlBackend.capabilities.max_outstanding_per_peer:
                message = f"{len(self._moving)} transfers to {self.peer} are outstanding already"
                raise TransferError(message)
            if not self._moving and self._agent.prepared_count > _MAX_PREPARED:
                self._agent.forget_prepared()
            transfer = NixlTransfer(self, self._make(parts))
            self._moving.add(transfer)
            self._ask(transfer, self._agent.post)
        return transfer

    def advance(self, transfer: NixlTransfer) -> None:
        """Ask the engine after a transfer that is not settled."""
        with self._lock:
            # After a failure the engine only repeats it; a fence is what settles.
            if not transfer.settled and transfer.status is Status.MOVING:
                self._ask(transfer, self._agent.done)

    def fence(self) -> None:
        """See ``Link.fence``."""
        if not self._lock.acquire(timeout=_FENCE_WAIT_S):
            message = f"the link to {self.peer} is in a native call that does not return"
            raise BackendError(message)
        try:
            self._fence(PeerDisconnectedError(f"the link to {self.peer} was fenced"))
        finally:
            self._lock.release()

    def _make(self, parts: Sequence[Part]) -> list[int]:
        """Make the requests of a checked write, all or none."""
        requests: list[int] = []
        try:
            for (source, destination), (source_blocks, blocks) in _by_grids(parts).items():
                from_grid = self._agent.prepare(None, self._local[source.region], source)
                to_grid = self._agent.prepare(
                    self._remote_agent, self._remote[destination.region], destination
                )
                requests.append(self._agent.make(from_grid, source_blocks, to_grid, blocks))
        except PeerDisconnectedError as error:
            self._fence(error)
            raise
        except BackendError as error:
            self._agent.release(requests)
            message = f"write to {self.peer}: {error}"
            raise TransferError(message) from error
        return requests

    def _ask(self, transfer: NixlTransfer, call: Callable[[int], bool]) -> None:
        """Post or poll (``call``) the requests of a transfer that moves."""
        moving = []
        try:
            for request in transfer.requests:
                if call(request):
                    self._agent.release([request])
                else:
                    moving.append(request)
        except PeerDisconnectedError as error:
            transfer.fail(error)
            self._fence(error)
        except BackendError as error:
            transfer.fail(TransferError(f"write to {self.peer}: {error}"))
        else:
            transfer.requests = moving
            if not moving:
                self._moving.discard(transfer)
                transfer.end(None)

    def _fence(self, error: PeerDisconnectedError) -> None:
        """Destroy the agent; every transfer that moves ends with ``error``. The lock is held."""
        if self.fenced:
            return
        self._agent.destroy()
        self.fenced = True
        for transfer in self._moving:
            transfer.end(error)
        self._moving.clear()


class NixlBackend(Backend):
    """NIXL over UCX, for host and for CUDA memory."""

    name = "nixl"
    capabilities = Capabilities(
        cancellable=False,
        max_outstanding_per_peer=64,
        min_efficient_bytes=16384,
        lands_after_settled=True,
    )

    def __init__(self, agent: str, options: Mapping[str, object]) -> None:
        """See ``Backend``; the keys are those of ``Options``."""
        super().__init__(agent, options)
        try:
            self._settings = msgspec.convert(dict(options), Options)
        except msgspec.ValidationError as error:
            message = f"nixl options: {error}"
            raise BackendError(message) from error
        self._bindings: Any = None
        self._sends = False
        self._regions: list[Region] = []
        self._receiver: Agent | None = None
        self._scrap_memory = mmap.mmap(-1, mmap.PAGESIZE)
        address = np.frombuffer(self._scrap_memory, np.uint8).ctypes.data
        self._scrap = Region(address, _PROBE_BYTES)
        self._numbers = count(1)
        self._links: list[NixlLink] = []
        # ``connect`` runs in any thread.
        self._links_lock = threading.Lock()

    def start(self, *, sends: bool) -> None:
        """See ``Backend.start``; the first one in a process loads the engine (0.5 s)."""
        self._bindings = load_bindings(self._settings.environment())
        self._sends = sends
        if sends:
            # Transports or devices that this host lacks are told now, not at the first peer.
            self._new_agent(f"{self.agent}#start", None).destroy()
        else:
            self._receiving_agent()

    def register(self, region: Region) -> int:
        """See ``Backend.register``. Links that are open already do not learn of it."""
        self._check_started()
        check_region(region, self._regions, ("host", "cuda"))
        if self._receiver is not None:
            self._receiver.register(region)
        self._regions.append(region)
        return len(self._regions) - 1

    def endpoint(self) -> bytes:
        """See ``Backend.endpoint``."""
        self._check_started()
        metadata = self._receiving_agent().metadata()
        regions = tuple(_as_remote(region) for region in self._regions)
        scrap = _as_remote(self._scrap)
        return msgspec.msgpack.encode(_Endpoint(self.agent, metadata, zlib.crc32(metadata), regions, scrap))

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """See ``Backend.connect``; it waits until the peer's engine has answered."""
        self._check_started()
        if not self._sends:
            message = "connect needs an engine started with sends=True"
            raise BackendError(message)
        remote = _decode(peer, endpoint)
        agent = None
        try:
            agent = self._new_agent(f"{self.agent}>{peer}#{next(self._numbers)}", None)
            for region in (*self._regions, self._scrap):
                agent.register(region)
            link = NixlLink(peer, agent, self._regions, remote)
            link.probe(self._scrap, _as_region(remote.probe), self._settings.connect_timeout_s)
        except BackendError as error:
            if agent is not None:
                agent.destroy()
            message = f"{peer} cannot be reached: {error}"
            raise ConnectError(message) from error
        with self._links_lock:
            self._links = [*(other for other in self._links if not other.fenced), link]
        return link

    def close(self) -> None:
        """See ``Backend.close``."""
        with self._links_lock:
            links, self._links = self._links, []
        for link in links:
            link.fence()
        if self._receiver is not None:
            self._receiver.destroy()
            self._receiver = None
        self._regions.clear()
        self._bindings = None

    def _check_started(self) -> None:
        """Refuse a call before ``start`` or after ``close``."""
        if self._bindings is None:
            message = f"the nixl backend of {self.agent} is not started"
            raise BackendError(message)

    def _new_agent(self, name: str, progress_delay_us: int | None) -> Agent:
        """Make an agent; its error says what was asked of the engine."""
        try:
            return Agent(AgentSettings(self._bindings, name, progress_delay_us))
        except BackendError as error:
            message = f"{error}; asked for: {self._settings.environment()}"
            raise BackendError(message) from error

    def _receiving_agent(self) -> Agent:
        """The agent into whose memory others write; made when first needed."""
        if self._receiver is None:
            agent = self._new_agent(self.agent, self._settings.progress_delay_us)
            for region in (*self._regions, self._scrap):
                agent.register(region)
            self._receiver = agent
        return self._receiver


def _decode(peer: str, endpoint: bytes) -> _Endpoint:
    """Read what a peer's ``endpoint()`` returned.

    Raises:
        ConnectError: it is damaged or of another backend.

    """
    try:
        remote = msgspec.msgpack.decode(endpoint, type=_Endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the endpoint of {peer} is not one of nixl: {error}"
        raise ConnectError(message) from error
    if zlib.crc32(remote.metadata) != remote.metadata_crc:
        message = f"the endpoint of {peer} is damaged"
        raise ConnectError(message)
    return remote


def _as_remote(region: Region) -> _RemoteRegion:
    """What a peer must know about a region."""
    return _RemoteRegion(
        region.address, region.size_bytes, "host" if region.memory == "host" else "cuda", region.device
    )


def _as_region(remote: _RemoteRegion) -> Region:
    """A peer's region, in the form of ours; the address means something only to the peer."""
    return Region(remote.address, remote.size_bytes, remote.memory, remote.device)


def _by_grids(parts: Sequence[Part]) -> dict[tuple[Grid, Grid], tuple[BlockIndex, BlockIndex]]:
    """Join parts with the same pair of grids: fewer requests, longer runs."""
    groups: dict[tuple[Grid, Grid], list[Part]] = {}
    for part in parts:
        if part.source_blocks.size:
            groups.setdefault((part.source, part.destination), []).append(part)
    return {
        grids: (
            np.concatenate([part.source_blocks for part in group]),
            np.concatenate([part.destination_blocks for part in group]),
        )
        for grids, group in groups.items()
    }
