"""The ``mooncake`` backend: Mooncake's Transfer Engine, over TCP; RDMA can be chosen, but is not tested.

Engines
    The receiving side has some native engines (``Options.receivers``), all for the same memory. The sending
    side has two *per link*, each with 16 connections to each of the peer's: the first contact with a peer
    holds an engine up, for a minute when that peer is stopped; and to destroy engines, which is the only way
    to stop them, must touch no other link.

Settled
    Mooncake cannot cancel. But the engines have few bytes of a link at a time, each piece under an id of its
    own, and an id that has ended, either way, does not read its source any more. So a transfer that
    failed settles when its last id has ended. A lost peer's link fences itself at once.

Incarnations
    Mooncake has no notion of them: it connects again by itself, to whatever process has the host and
    port. What this backend guarantees: nothing is written to any process but the one that gave the
    endpoint. Each process that receives has a random incarnation, which is in its endpoint. ``connect``
    makes all connections that the link will ever have, without a write, and then fails unless that very
    process says that it is there. A link posts only what finds one of these connections idle, so its
    engines never connect again. And it looks, before it posts and while it is polled, whether the process
    is still there, and is fenced when it is not. (All this is for TCP. With RDMA connections are Mooncake's
    own affair.)

Nobody is authenticated: whoever reaches an engine's ports, which are open on all interfaces, can
write into memory that is registered with it. Keep these ports within a network that you trust.

Options (see ``Options``) become environment variables of the process, before the engine is loaded.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from backends.base import Backend, BackendError, Capabilities, ConnectError, Region, fence_all
from backends.memory import check_region
from backends.mooncake_connections import ENGINES, Connections, files_for_each
from backends.mooncake_endpoint import MAX_ENGINES, Endpoint, RemoteEngine, RemoteRegion, decode
from backends.mooncake_engine import Engine, EngineSettings, find_engine, load_engine
from backends.mooncake_link import MAX_OUTSTANDING, MooncakeLink
from backends.mooncake_presence import Presence, PresenceListener
from backends.mooncake_warmup import Scrap, WarmUp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.base import Link

logger = logging.getLogger(__name__)

_INFINIBAND: Final = Path("/sys/class/infiniband")

# Importing this module says whether Mooncake is installed, without loading it.
find_engine()


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the mooncake backend.

    Attributes:
        host: the IPv4 address of this host under which peers reach it.
        protocol: ``"tcp"``, or ``"rdma"``, which is not tested.
        device: RDMA devices, for example ``"mlx5_0"``, separated by commas; empty: all.
        receivers: engines that the receiving side has. A sender has 32 connections to each, on which small
            pieces travel side by side, and so takes 32 times as many open files, and one more.
        peer_timeout_s: after how long a peer that takes no bytes, or whose host is silent, counts as
            lost; rounded up to whole seconds.
        connect_timeout_s: how long each of the three steps of ``connect`` may take: to hear that the
            incarnation is there, to make all connections to its engines, to hear that it is still there.

    """

    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_,.-]*\Z")] = ""
    receivers: Annotated[int, Meta(ge=1, le=MAX_ENGINES)] = 4
    peer_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 15.0
    connect_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 20.0

    def __post_init__(self) -> None:
        """Refuse what the engine would take and fail with later."""
        try:
            address = ipaddress.IPv4Address(self.host)
        except ValueError as error:
            message = f"host: {error}"
            raise ValueError(message) from error
        if address.is_unspecified or address.is_multicast:
            message = f"host: {address} is not the address of one host"
            raise ValueError(message)
        if self.device and self.protocol == "tcp":
            message = "device is for protocol 'rdma'"
            raise ValueError(message)

    def environment(self) -> dict[str, str]:
        """The variables that say the same to the engine."""
        peer_timeout_s = str(math.ceil(self.peer_timeout_s))
        wanted = {
            "MC_TCP_STATUS_TIMEOUT_SEC": peer_timeout_s,
            "MC_TCP_PROGRESS_TIMEOUT_SEC": peer_timeout_s,
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(math.ceil(self.connect_timeout_s)),
        }
        if self.protocol == "tcp":
            # Otherwise it takes RDMA wherever there is a device, whatever it is told.
            wanted["MC_FORCE_TCP"] = "1"
        return wanted


class MooncakeBackend(Backend):
    """Mooncake's Transfer Engine, for host memory, and for CUDA memory where its package can."""

    name = "mooncake"
    capabilities = Capabilities(
        cancellable=False,
        max_outstanding_per_peer=MAX_OUTSTANDING,
        min_efficient_bytes=262144,
        lands_after_settled=True,
    )

    def __init__(self, agent: str, options: Mapping[str, object]) -> None:
        """See ``Backend``; the keys are those of ``Options``."""
        super().__init__(agent, options)
        try:
            self._settings = msgspec.convert(dict(options), Options)
        except msgspec.ValidationError as error:
            message = f"mooncake options: {error}"
            raise BackendError(message) from error
        self._module: Any = None
        self._sends = False
        self._regions: list[Region] = []
        self._receivers: list[Engine] = []
        self._listener: PresenceListener | None = None
        self._scrap = Scrap()
        self._links: list[MooncakeLink] = []
        # ``connect`` runs in any thread.
        self._links_lock = threading.Lock()

    def start(self, *, sends: bool) -> None:
        """See ``Backend.start``; the first one in a process loads the engine."""
        if self._settings.protocol == "rdma":
            if not _INFINIBAND.is_dir():
                message = f"protocol 'rdma': this host has no RDMA device ({_INFINIBAND})"
                raise BackendError(message)
            logger.warning("mooncake over RDMA is not tested")
        self._check_host()
        self._module = load_engine(self._settings.environment())
        self._sends = sends
        if sends:
            # What this host lacks is told now, not at the first peer.
            self._new_engine().destroy()
        else:
            self._receiving_side()

    def register(self, region: Region) -> int:
        """See ``Backend.register``. Links that are open already do not learn of it."""
        self._check_started()
        kinds = ("host", "cuda") if self._module.SUPPORT_CUDA else ("host",)
        check_region(region, self._regions, kinds)
        for engine in self._receivers:
            engine.register(region)
        self._regions.append(region)
        return len(self._regions) - 1

    def endpoint(self) -> bytes:
        """See ``Backend.endpoint``."""
        self._check_started()
        engines, listener = self._receiving_side()
        regions = tuple(RemoteRegion(region.address, region.size_bytes) for region in self._regions)
        return msgspec.msgpack.encode(
            Endpoint(
                self.agent,
                self._settings.protocol,
                self._settings.host,
                tuple(RemoteEngine(engine.port, engine.data_port) for engine in engines),
                listener.port,
                listener.incarnation,
                regions,
                self._scrap.region.address,
            )
        )

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """See ``Backend.connect``; it waits until all of the peer's engines have answered."""
        self._check_started()
        if not self._sends:
            message = "connect needs an engine started with sends=True"
            raise BackendError(message)
        remote = decode(peer, endpoint)
        if remote.protocol != self._settings.protocol:
            message = f"{peer} uses protocol {remote.protocol!r}, we use {self._settings.protocol!r}"
            raise ConnectError(message)
        try:
            link = self._connect(peer, remote)
        except BackendError as error:
            message = f"{peer} cannot be reached: {error}"
            raise ConnectError(message) from error
        with self._links_lock:
            self._links = [*(other for other in self._links if not other.fenced), link]
        return link

    def close(self) -> None:
        """See ``Backend.close``."""
        with self._links_lock:
            links, self._links = self._links, []
        try:
            fence_all(links)
        finally:
            # In this order: whoever hears that we are here finds our engines, and whoever sees that we are
            # gone does not find one that writes.
            if self._listener is not None:
                self._listener.mute()
            for engine in self._receivers:
                engine.destroy()
            self._receivers.clear()
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            self._regions.clear()
            self._module = None

    def silent(self) -> bool:
        """See ``Backend.silent``: over TCP our own engine writes what arrives, and it is destroyed."""
        is_closed = self._module is None and not self._receivers
        return is_closed and self._settings.protocol == "tcp"

    def _connect(self, peer: str, remote: Endpoint) -> MooncakeLink:
        """Make a link whose engines have met the peer's."""
        timeout_s = self._settings.connect_timeout_s
        with ExitStack() as undo:
            # First, and without the engine: a peer that is stopped would hold that up for a minute.
            presence = Presence(
                remote.host,
                remote.presence_port,
                remote.incarnation,
                timeout_s,
                self._settings.peer_timeout_s,
            )
            undo.callback(presence.close)
            engines = []
            for _ in range(ENGINES):
                engine = self._new_engine()
                undo.callback(_abandon, engine)
                for region in (*self._regions, self._scrap.region):
                    engine.register(region)
                engines.append(engine)
            WarmUp(engines, remote, self._scrap).wait(timeout_s)
            # So the connections lead to that incarnation: it is there after they were made.
            presence.confirm(timeout_s)
            undo.pop_all()
        return MooncakeLink(peer, Connections(engines, remote), presence, self._regions, remote)

    def _check_started(self) -> None:
        """Refuse a call before ``start`` or after ``close``."""
        if self._module is None:
            message = f"the mooncake backend of {self.agent} is not started"
            raise BackendError(message)

    def _check_host(self) -> None:
        """Refuse an address that is not ours: the engine would look for itself there."""
        host = self._settings.host
        try:
            with socket.create_server((host, 0)):
                pass
        except OSError as error:
            message = f"mooncake options: host {host!r} is no address of this host: {error}"
            raise BackendError(message) from error

    def _new_engine(self) -> Engine:
        settings = self._settings
        return Engine(EngineSettings(self._module, settings.host, settings.protocol, settings.device))

    def _receiving_side(self) -> tuple[list[Engine], PresenceListener]:
        """The engines into whose memory others write, and what says that we are there."""
        while len(self._receivers) < self._settings.receivers:
            engine = self._new_engine()
            for region in (*self._regions, self._scrap.region):
                engine.register(region)
            self._receivers.append(engine)
        if self._listener is None:
            files = files_for_each(self._settings.receivers) + 1
            self._listener = PresenceListener(self._settings.host, files)
        return self._receivers, self._listener


def _abandon(engine: Engine) -> None:
    """Destroy an engine that did not get to know its peer, or leave it to the call that is stuck in it.

    It has nothing to read but our scrap.
    """
    try:
        engine.destroy()
    except BackendError as error:
        logger.warning("%s; it ends with its last call", error)
