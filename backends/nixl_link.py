"""A nixl link: what an endpoint says, and the writes towards one peer."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from backends.base import (
    BackendError,
    ConnectError,
    Grid,
    Link,
    PeerDisconnectedError,
    Region,
    Status,
    Transfer,
    TransferError,
)
from backends.descriptors import all_blocks, check_parts
from backends.owned import OwnedTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import BlockIndex, Part
    from backends.gate import Passage
    from backends.nixl_engine import Agent

logger = logging.getLogger(__name__)

#: Length of a probe, and of a block of the scrap of memory that every backend keeps for them.
PROBE_BYTES: Final = 8
#: The blocks of the scrap. Where a link's probe arrives says whether it goes through the gate, where it
#: must; what is sent comes from the last one.
GUARDED: Final = 0
UNGUARDED: Final = 1
PROBE: Final = 2
SCRAP_BYTES: Final = 3 * PROBE_BYTES
MAX_OUTSTANDING: Final = 64
_SCRAP_GRID: Final = Grid(0, 0, PROBE_BYTES, PROBE_BYTES, 3)
#: How long a fence waits for a native call to return.
FENCE_WAIT_S: Final = 5.0
#: How soon a probe is asked after: a share of the time that it has taken so far, within two bounds. A peer
#: that is stopped may be waited for as long as a connect may take, and costs next to nothing meanwhile.
_PROBE_SHARE: Final = 0.05
_MIN_PROBE_POLL_S: Final = 0.0002
_MAX_PROBE_POLL_S: Final = 0.05
_MAX_PREPARED: Final = 128


class RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer addresses it."""

    address: Annotated[int, Meta(ge=1, le=2**62)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]
    memory: Literal["host", "cuda"]
    device: Annotated[int, Meta(ge=0, le=1024)]


class GateAddress(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the gate is through which writers on the same host go (``backends.gate``).

    ``host`` names the host and its PID namespace: only processes with the same one can copy into
    each other's memory by themselves.
    """

    path: Annotated[str, Meta(max_length=255)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]
    number: Annotated[int, Meta(ge=1, lt=2**40)]
    host: Annotated[str, Meta(max_length=255)]


class Endpoint(Struct, frozen=True, array_like=True, tag="nixl", forbid_unknown_fields=True):
    """What ``endpoint()`` returns, as msgpack.

    Attributes:
        agent: the backend's name.
        metadata: of the receiving agent; opaque, and parsed by native code.
        metadata_crc: of ``metadata``, so that native code never parses a damaged one.
        regions: in the order of their registration.
        probe: a scrap of memory into which a new link writes to see that the peer answers.
        gate: None when the memory has no file.

    """

    agent: Annotated[str, Meta(max_length=255)]
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    metadata_crc: int
    regions: Annotated[tuple[RemoteRegion, ...], Meta(max_length=4096)]
    probe: RemoteRegion
    gate: GateAddress | None = None


def decode(peer: str, endpoint: bytes) -> Endpoint:
    """Read what a peer's ``endpoint()`` returned.

    Raises:
        ConnectError: it is damaged or of another backend.

    """
    try:
        remote = msgspec.msgpack.decode(endpoint, type=Endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the endpoint of {peer} is not one of nixl: {error}"
        raise ConnectError(message) from error
    if zlib.crc32(remote.metadata) != remote.metadata_crc:
        message = f"the endpoint of {peer} is damaged"
        raise ConnectError(message)
    return remote


def as_remote(region: Region) -> RemoteRegion:
    """What a peer must know about a region."""
    return RemoteRegion(
        region.address, region.size_bytes, "host" if region.memory == "host" else "cuda", region.device
    )


def as_region(remote: RemoteRegion) -> Region:
    """A peer's region, in the form of ours; the address means something only to the peer."""
    return Region(remote.address, remote.size_bytes, remote.memory, remote.device)


class Due(NamedTuple):
    """When a peer must have answered, on the monotonic clock, and how long after the beginning that is."""

    at_s: float
    timeout_s: float


class NixlTransfer(OwnedTransfer):
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
        """See ``OwnedTransfer.end``."""
        super().end(error)
        self.requests = []


class NixlLink(Link):
    """An agent of its own, towards one peer."""

    def __init__(
        self, peer: str, agent: Agent, local: Sequence[Region], remote: Endpoint, passage: Passage | None
    ) -> None:
        """Learn the peer; ``local`` is registered with ``agent`` already, ``passage`` is the link's own.

        Raises:
            BackendError: the peer cannot be reached or does not know its own endpoint.

        """
        self.peer = peer
        self._passage = passage
        self._agent = agent
        self._local = list(local)
        self._local_bytes = [region.size_bytes for region in local]
        self._remote = [as_region(region) for region in remote.regions]
        self._remote_bytes = [region.size_bytes for region in self._remote]
        # A pool with a region for each plane has a grid for each, on both sides, in every write.
        self._most_prepared = _MAX_PREPARED + len(self._local) + len(self._remote)
        self._moving: set[NixlTransfer] = set()
        self._lock = threading.Lock()
        self.fenced = False
        self._remote_agent = agent.add_peer(remote.metadata)

    def probe(self, scrap: Region, remote: Region, block: int, due: Due) -> None:
        """Write a few bytes to a block of the peer's scrap, and wait for its engine.

        Raises:
            BackendError: it is gone or does not answer in time. The caller destroys the agent, then.

        """
        # As any write: a copy by this host's own means would land in memory that the peer has given back.
        if self._passage is not None and not self._passage.enter():
            raise self._shut()
        source = self._agent.prepare(None, scrap, _SCRAP_GRID)
        destination = self._agent.prepare(self._remote_agent, remote, _SCRAP_GRID)
        blocks = np.array([PROBE], np.int32), np.array([block], np.int32)
        request = self._agent.make(source, blocks[0], destination, blocks[1])
        began_s = time.monotonic()
        done = self._agent.post(request)
        while not done:
            waited_s = time.monotonic() - began_s
            if time.monotonic() > due.at_s:
                message = f"its engine did not answer within {due.timeout_s:g} s"
                raise BackendError(message)
            time.sleep(min(max(_PROBE_SHARE * waited_s, _MIN_PROBE_POLL_S), _MAX_PROBE_POLL_S))
            done = self._agent.done(request)
        self._agent.release([request])
        self._agent.forget_prepared()
        self._rest()

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        self.check(parts)
        return self.post(parts)

    def check(self, parts: Sequence[Part]) -> int:
        """Refuse a write that is not wholly inside registered memory; return its size in bytes.

        Raises:
            InvalidTransferError: naming what is wrong.

        """
        return check_parts(parts, self._local_bytes, self._remote_bytes)

    def post(self, parts: Sequence[Part]) -> Transfer:
        """Post a write that was checked; raises what ``write`` does."""
        with self._lock:
            if self.fenced:
                message = f"the link to {self.peer} was fenced or its peer is gone; connect anew"
                raise PeerDisconnectedError(message)
            if len(self._moving) >= MAX_OUTSTANDING:
                message = f"{len(self._moving)} transfers to {self.peer} are outstanding already"
                raise TransferError(message)
            if not self._moving and self._agent.prepared_count > self._most_prepared:
                self._agent.forget_prepared()
            self._go_in()
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
        if not self._lock.acquire(timeout=FENCE_WAIT_S):
            message = f"the link to {self.peer} is in a native call that does not return"
            raise BackendError(message)
        try:
            self._fence(PeerDisconnectedError(f"the link to {self.peer} was fenced"))
        finally:
            self._lock.release()

    def _go_in(self) -> None:
        """Be inside the peer's gate as long as anything moves; the peer that shut it is gone."""
        if self._passage is not None and not self._passage.enter():
            error = self._shut()
            self._fence_lost(error)
            raise error

    def _look(self) -> None:
        """See that the gate is still open: a copy by this host's own means would not notice."""
        if self._passage is not None and not self._passage.is_open():
            raise self._shut()

    def _shut(self) -> PeerDisconnectedError:
        return PeerDisconnectedError(f"{self.peer} is gone: it has shut its memory; connect anew")

    def _rest(self) -> None:
        """Leave the gate when nothing moves any more."""
        if self._passage is not None and not self._moving:
            self._passage.leave()

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
            self._fence_lost(error)
            raise
        except BackendError as error:
            self._agent.release(requests)
            self._rest()
            message = f"write to {self.peer}: {error}"
            raise TransferError(message) from error
        return requests

    def _ask(self, transfer: NixlTransfer, call: Callable[[int], bool]) -> None:
        """Post or poll (``call``) the requests of a transfer that moves."""
        moving = []
        try:
            self._look()
            for request in transfer.requests:
                if call(request):
                    self._agent.release([request])
                    transfer.progress += 1
                else:
                    moving.append(request)
        except PeerDisconnectedError as error:
            transfer.fail(error)
            self._fence_lost(error)
        except BackendError as error:
            transfer.fail(TransferError(f"write to {self.peer}: {error}"))
        else:
            transfer.requests = moving
            if not moving:
                self._moving.discard(transfer)
                transfer.end(None)
                self._rest()

    def _fence_lost(self, error: PeerDisconnectedError) -> None:
        """Fence, because the peer is lost; nobody asked for it, so nobody is told when it fails."""
        try:
            self._fence(error)
        except BackendError:
            # Its transfers stay unsettled, and the owner's own fence will say it again.
            logger.exception("the link to %s is dead and cannot be fenced", self.peer)

    def _fence(self, error: PeerDisconnectedError) -> None:
        """Destroy the agent; every transfer that moves ends with ``error``. The lock is held."""
        if self.fenced:
            return
        self._agent.destroy()
        self.fenced = True
        if self._passage is not None:
            self._passage.close()
        for transfer in self._moving:
            transfer.end(error)
        self._moving.clear()


def _by_grids(parts: Sequence[Part]) -> dict[tuple[Grid, Grid], tuple[BlockIndex, BlockIndex]]:
    """Join parts with the same pair of grids: fewer requests, longer runs."""
    groups: dict[tuple[Grid, Grid], list[tuple[BlockIndex, BlockIndex]]] = {}
    for part in parts:
        if part.source_blocks.size:
            groups.setdefault((part.source, part.destination), []).append(all_blocks(part))
    return {
        grids: group[0]
        if len(group) == 1
        else (np.concatenate([ours for ours, _ in group]), np.concatenate([theirs for _, theirs in group]))
        for grids, group in groups.items()
    }
