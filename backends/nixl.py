"""The ``nixl`` backend: NIXL with its UCX plugin (RDMA, TCP, shared memory on one host).

Engines
    The receiving side has one native agent, with a progress thread. The sending side has one agent
    *per link*, without such a thread: ``Transfer.poll`` makes the progress, an idle link costs
    nothing, and destroying that agent, which is the only way to stop NIXL, touches no other link.
    To a peer on the same host a link has two agents, and threads that post (``backends.nixl_threads``).

Settled
    NIXL cannot cancel: a released request goes on, an error does not mean that nothing moves. So a
    transfer settles when it is done or its agent is destroyed. When the peer is lost the link is
    dead anyhow, and fences itself at once. After any other error only ``fence`` settles the transfer.

Silent
    Over TCP and RDMA nothing lands any more once the receiving agent is destroyed. But on one host a
    sender may copy by itself (CMA), and then a write that was posted after that destruction lands
    whole, as an error. So writers that are able to must go through a gate on the memory's file, or on
    one that stands for it (``backends.gate``). One that cannot find the file says so, in the probe with
    which its link begins, and this side is never silent then.

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
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from backends.base import (
    Backend,
    BackendError,
    Capabilities,
    ConnectError,
    InvalidTransferError,
    Region,
    fence_all,
)
from backends.gate import Gate, Passage
from backends.memory import check_region, open_shared, this_host
from backends.nixl_engine import Agent, AgentSettings, find_bindings, load_bindings
from backends.nixl_link import (
    GUARDED,
    MAX_OUTSTANDING,
    PROBE,
    PROBE_BYTES,
    SCRAP_BYTES,
    UNGUARDED,
    Due,
    Endpoint,
    GateAddress,
    NixlLink,
    as_region,
    as_remote,
    decode,
)
from backends.nixl_threads import ThreadedLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import Link

logger = logging.getLogger(__name__)

#: What UCX calls the transports that hand bytes to the peer's side, and never write its memory by themselves.
_NETWORK: Final = frozenset(
    {"tcp", "ib"}
    | {"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5"}
    | {"ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5"}
    | {"dc", "dc_x", "dc_mlx5"}
)
#: Two copy 1.7 times as fast as one on a host with two cores.
_COPYING_THREADS: Final = 2

# Where probes are written. A sender without a way through the gate may write its own long after this side has
# closed: that must never be anybody else's memory. A page for each endpoint of this process.
_scraps: Final[dict[int, mmap.mmap]] = {}

# Importing this module says whether NIXL is installed, without loading it.
find_bindings()


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
        threads_per_peer: threads that post writes to one peer, each with an agent of its own
            (``backends.nixl_threads``). Left out: 2 where UCX may copy host memory to a peer on the same
            host by itself, and none elsewhere, for there bytes move in the background.

    """

    transports: Annotated[str, Meta(pattern=r"^\^?[A-Za-z0-9_,:]*\Z")] = ""
    devices: Annotated[str, Meta(pattern=r"^\^?[A-Za-z0-9_,:.-]*\Z")] = ""
    tcp_user_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 15.0
    progress_delay_us: Annotated[int, Meta(ge=100, le=1_000_000)] = 1000
    connect_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    threads_per_peer: Annotated[int, Meta(ge=0, le=16)] | None = None

    def environment(self) -> dict[str, str]:
        """The variables that say the same to UCX."""
        wanted = {"UCX_TLS": self.transports, "UCX_NET_DEVICES": self.devices}
        if self.tcp_user_timeout_s:
            wanted["UCX_TCP_USER_TIMEOUT"] = f"{self.tcp_user_timeout_s * 1000:.0f}ms"
        return {name: value for name, value in wanted.items() if value}

    def may_copy(self) -> bool:
        """Whether UCX may write into the memory of a peer on the same host by its own means."""
        return not self.transports or not _NETWORK.issuperset(self.transports.split(","))


class NixlBackend(Backend):
    """NIXL over UCX, for host and for CUDA memory."""

    name = "nixl"
    capabilities = Capabilities(
        cancellable=False,
        max_outstanding_per_peer=MAX_OUTSTANDING,
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
        scrap = np.frombuffer(self._scrap_memory, np.uint8)
        scrap[PROBE_BYTES * PROBE : SCRAP_BYTES] = 1
        self._scrap = Region(scrap.ctypes.data, SCRAP_BYTES)
        self._gate: Gate | None = None
        self._gate_address: GateAddress | None = None
        self._numbers = count(1)
        self._links: list[NixlLink | ThreadedLink] = []
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
        if self._gate is None and not self._sends:
            self._open_gate(region)
        self._regions.append(region)
        return len(self._regions) - 1

    def endpoint(self) -> bytes:
        """See ``Backend.endpoint``."""
        self._check_started()
        metadata = self._receiving_agent().metadata()
        regions = tuple(as_remote(region) for region in self._regions)
        scrap = as_remote(self._scrap)
        _scraps[id(self._scrap_memory)] = self._scrap_memory
        return msgspec.msgpack.encode(
            Endpoint(self.agent, metadata, zlib.crc32(metadata), regions, scrap, self._gate_address)
        )

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """See ``Backend.connect``; it waits until the peer's engine has answered."""
        self._check_started()
        if not self._sends:
            message = "connect needs an engine started with sends=True"
            raise BackendError(message)
        remote = decode(peer, endpoint)
        threads = self._threads_to(remote)
        timeout_s = self._settings.connect_timeout_s
        due = Due(time.monotonic() + timeout_s, timeout_s)
        links: list[NixlLink] = []
        try:
            for _ in range(max(1, threads)):
                links.append(self._open(peer, remote, due))  # noqa: PERF401 - those before one that fails are fenced
            link = ThreadedLink(peer, links) if threads else links[0]
        except BackendError as error:
            self._give_up(links)
            message = f"{peer} cannot be reached: {error}"
            raise ConnectError(message) from error
        self._remember(link)
        return link

    def close(self) -> None:
        """See ``Backend.close``."""
        with self._links_lock:
            links, self._links = self._links, []
        try:
            fence_all(links)
        finally:
            if self._receiver is not None:
                self._receiver.destroy()
                self._receiver = None
            self._regions.clear()
            self._bindings = None
            if self._gate is not None:
                self._gate.shut()

    def silent(self) -> bool:
        """See ``Backend.silent``; memory that has no gate is never known to be."""
        is_closed = self._bindings is None and self._receiver is None
        unguarded = any(self._scrap_memory[PROBE_BYTES * UNGUARDED :][:PROBE_BYTES])
        return is_closed and not unguarded and self._gate is not None and self._gate.is_empty()

    def _threads_to(self, remote: Endpoint) -> int:
        """How many threads post writes to this peer."""
        if self._settings.threads_per_peer is not None:
            return self._settings.threads_per_peer
        near = remote.gate is not None and remote.gate.host == this_host()
        kinds = {region.memory for region in self._regions} | {region.memory for region in remote.regions}
        return _COPYING_THREADS if near and kinds == {"host"} and self._settings.may_copy() else 0

    def _remember(self, *links: NixlLink | ThreadedLink) -> None:
        """Fence these when we are closed."""
        with self._links_lock:
            self._links = [*(other for other in self._links if not other.fenced), *links]

    def _give_up(self, links: Sequence[NixlLink]) -> None:
        """Fence links that nobody will use; what cannot be is tried again when we are closed."""
        try:
            fence_all(links)
        except BackendError:
            logger.exception("links that were just opened cannot be fenced")
            self._remember(*links)

    def _open(self, peer: str, remote: Endpoint, due: Due) -> NixlLink:
        """Open a link with an agent of its own, and wait until the peer's engine has answered.

        Raises:
            BackendError: it cannot be opened.

        """
        passage, block = _passage(remote.gate) if self._settings.may_copy() else (None, GUARDED)
        agent = None
        try:
            agent = self._new_agent(f"{self.agent}>{peer}#{next(self._numbers)}", None)
            for region in (*self._regions, self._scrap):
                agent.register(region)
            link = NixlLink(peer, agent, self._regions, remote, passage)
            link.probe(self._scrap, as_region(remote.probe), block, due)
        except BackendError:
            try:
                if agent is not None:
                    agent.destroy()
            finally:
                if passage is not None:
                    passage.close()
            raise
        return link

    def _open_gate(self, region: Region) -> None:
        """Open the gate for all of our memory, on the file of one region, if it has any."""
        own = region.path is not None
        path, size_bytes = (region.path, region.size_bytes) if own else (region.gate_path, region.gate_bytes)
        if path is not None:
            self._gate = Gate(open_shared(path, size_bytes))
            self._gate_address = GateAddress(path, size_bytes, self._gate.number, this_host())

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


def _passage(gate: GateAddress | None) -> tuple[Passage | None, int]:
    """Find the way through a peer's gate; returns it, and the block for the probe that says so."""
    if gate is None or gate.host != this_host():
        return None, GUARDED
    try:
        return Passage.at(gate.path, gate.size_bytes, gate.number), GUARDED
    except InvalidTransferError:
        return None, UNGUARDED
