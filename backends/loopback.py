"""The ``loopback`` backend: plain memory copies inside ``/dev/shm``, with scriptable faults.

It needs no native engine. The receiving side registers memory that is a file in ``/dev/shm``; the
sending side maps that file and copies with numpy. A write is copied whole inside ``Link.write``
(as an engine with shared memory does), except where a fault of ``backends.faults`` slows it down.

How a dead peer is noticed: whoever registers a file holds a shared ``flock`` on it, which the
kernel drops when the last process that holds the descriptor dies. A sender that gets the exclusive
lock knows that nobody is there.

Options: ``faults`` and ``control``, both described in ``backends.faults``.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgspec
import numpy as np
from msgspec import Meta, Struct

from backends.base import (
    Backend,
    BackendError,
    Capabilities,
    ConnectError,
    InvalidTransferError,
    Link,
    PeerDisconnectedError,
    Status,
    Transfer,
    TransferError,
)
from backends.descriptors import check_parts
from backends.faults import FaultScript
from backends.memory import check_region, maps_file, open_shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from backends.base import BlockIndex, Grid, Part, Region
    from backends.faults import Fault

    Bytes = NDArray[np.uint8]

#: Gathered at once: stays in the processor's cache (measured: 3.5 GB/s, without a step 2.2).
_STEP_BYTES: Final = 1 << 20
_FENCE_WAIT_S: Final = 5.0


class _RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer finds it."""

    path: Annotated[str, Meta(max_length=255)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]


class _Endpoint(Struct, frozen=True, array_like=True, tag="loopback", forbid_unknown_fields=True):
    """What ``endpoint()`` returns, as msgpack."""

    agent: Annotated[str, Meta(max_length=255)]
    regions: Annotated[tuple[_RemoteRegion, ...], Meta(max_length=4096)]


class _PeerRegion:
    """A region of the peer, mapped here."""

    def __init__(self, remote: _RemoteRegion) -> None:
        """Map it.

        Raises:
            InvalidTransferError: its file is not what the endpoint says.

        """
        self._descriptor = open_shared(remote.path, remote.size_bytes)
        self._size_bytes = remote.size_bytes
        try:
            self.memory = mmap.mmap(self._descriptor, remote.size_bytes)
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            message = f"{remote.path!r} cannot be mapped: {error}"
            raise InvalidTransferError(message) from error

    def alive(self) -> bool:
        """Whether its owner lives and has not cut the file short (we would crash on a write)."""
        if os.fstat(self._descriptor).st_size != self._size_bytes:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap it; the caller sees to it that nothing copies any more."""
        self.memory.close()
        os.close(self._descriptor)


class LoopbackTransfer(Transfer):
    """A write: the blocks of its parts, copied in order."""

    __slots__ = ("_blocks_done", "_fault", "_link", "_moved_bytes", "_part", "_parts", "_since_s")

    def __init__(self, link: LoopbackLink, parts: Sequence[Part], fault: Fault | None) -> None:
        """Start at the first block; nothing is copied yet."""
        super().__init__()
        self._link = link
        self._parts = list(parts)
        self._fault = fault
        self._part = 0
        self._blocks_done = 0
        self._moved_bytes = 0
        # When the fault struck; for a slow write, when it began.
        self._since_s: float | None = None

    def poll(self) -> Status:
        """Copy what the script lets through."""
        with self._link.lock:
            if self._link.fenced:
                self.stop()
            elif not self.settled:
                self._advance()
        return self.status

    def stop(self) -> None:
        """The link was fenced: nothing more is copied."""
        if self.settled:
            return
        if self.status is Status.MOVING:
            self.error = PeerDisconnectedError(f"the link to {self._link.peer} was fenced")
        self.status, self.settled = Status.FAILED, True

    def _advance(self) -> None:
        """One step of a transfer that is not settled; the lock is held."""
        if not self._link.peer_alive():
            self.error = self.error or _gone(self._link.peer)
            self.status, self.settled = Status.FAILED, True
            return
        fault = self._fault
        if fault is not None and not self._link.faults.in_force(fault):
            fault = self._fault = None
        if fault is None:
            self._finish()
        elif fault.kind == "slow":
            self._since_s = self._since_s or time.monotonic()
            if self._copy((time.monotonic() - self._since_s) * fault.bytes_per_s):
                self._finish()
        else:
            self._copy(fault.after_bytes)
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """The bytes before the fault are in place: let it happen, or end."""
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if fault.kind == "crash":
            os.abort()
        elif fault.kind == "stall":
            if now_s - self._since_s >= fault.for_s:
                self._finish()
        else:
            if self.status is Status.MOVING:
                text = f"scripted fault {fault.kind!r} after {self._moved_bytes} bytes"
                error_type = PeerDisconnectedError if fault.kind == "disconnect" else TransferError
                self.status, self.error = Status.FAILED, error_type(text)
            if not fault.settle_s:
                self.settled = True
            elif now_s - self._since_s >= fault.settle_s:
                self._finish()

    def _finish(self) -> None:
        """Copy the rest: a transfer that has not failed is done. Nothing moves any more."""
        self._copy(math.inf)
        if self.status is Status.MOVING:
            self.status = Status.DONE
        self.settled = True

    def _copy(self, up_to_bytes: float) -> bool:
        """Copy the whole blocks that fit into ``up_to_bytes`` in all; true when none is left."""
        while self._part < len(self._parts):
            part = self._parts[self._part]
            block_bytes = part.source.block_bytes
            left = part.source_blocks.size - self._blocks_done
            fit = max(0.0, up_to_bytes - self._moved_bytes) // block_bytes
            step = int(min(left, max(1, _STEP_BYTES // block_bytes), fit))
            if step:
                self._link.copy(part, slice(self._blocks_done, self._blocks_done + step))
                self._moved_bytes += step * block_bytes
                self._blocks_done += step
            if step == left:
                self._part, self._blocks_done = self._part + 1, 0
            elif not step:
                return False
        return True


class LoopbackLink(Link):
    """A mapping of one peer's regions."""

    def __init__(self, backend: LoopbackBackend, peer: str, regions: list[_PeerRegion]) -> None:
        """Keep the mapping; ``backend`` knows our own regions."""
        self.peer = peer
        self.faults = backend.faults
        self.lock = threading.Lock()
        self.fenced = False
        self._local = backend.memory
        self._remote = regions
        self._remote_bytes = [len(region.memory) for region in regions]
        self._transfers: list[LoopbackTransfer] = []

    def write(self, parts: Sequence[Part]) -> Transfer:
        """See ``Link.write``."""
        check_parts(parts, [memory.size for memory in self._local], self._remote_bytes)
        with self.lock:
            if self.fenced or not self.peer_alive():
                raise _gone(self.peer)
        try:
            fault = self.faults.strikes("write", self.peer)
        except BackendError as error:
            raise TransferError(str(error)) from error
        if fault is not None and fault.kind == "hang":
            _hang()
        if fault is not None and fault.kind == "refuse":
            message = f"scripted fault 'refuse' at a write to {self.peer}"
            raise TransferError(message)
        transfer = LoopbackTransfer(self, parts, fault)
        transfer.poll()
        self._transfers = [other for other in self._transfers if not other.settled]
        if not transfer.settled:
            self._transfers.append(transfer)
        return transfer

    def fence(self) -> None:
        """See ``Link.fence``; here nothing copies after the lock was had."""
        if not self.lock.acquire(timeout=_FENCE_WAIT_S):
            message = f"the link to {self.peer} is in a call that does not return"
            raise BackendError(message)
        try:
            if self.fenced:
                return
            self.fenced = True
            for transfer in self._transfers:
                transfer.stop()
            self._transfers.clear()
            for region in self._remote:
                region.close()
        finally:
            self.lock.release()

    def peer_alive(self) -> bool:
        """Whether every region of the peer still has its owner."""
        return all(region.alive() for region in self._remote)

    def copy(self, part: Part, blocks: slice) -> None:
        """Copy some blocks of a checked part."""
        source = _grid_view(self._local[part.source.region], part.source)
        destination = _grid_view(self._remote[part.destination.region].memory, part.destination)
        from_run = _as_slice(part.source_blocks[blocks])
        to_run = _as_slice(part.destination_blocks[blocks])
        if from_run is not None and to_run is not None:
            destination[to_run] = source[from_run]
        else:
            destination[part.destination_blocks[blocks]] = source[part.source_blocks[blocks]]


class LoopbackBackend(Backend):
    """Memory copies between processes of one user on one host."""

    name = "loopback"
    capabilities = Capabilities(
        cancellable=False,
        max_outstanding_per_peer=64,
        min_efficient_bytes=4096,
        lands_after_settled=False,
    )

    def __init__(self, agent: str, options: Mapping[str, object]) -> None:
        """See ``Backend``; the options are ``backends.faults.Options``."""
        super().__init__(agent, options)
        self.faults = FaultScript(options)
        self.memory: list[Bytes] = []
        self._regions: list[Region] = []
        self._descriptors: list[int] = []
        self._links: list[LoopbackLink] = []
        self._sends: bool | None = None

    def start(self, *, sends: bool) -> None:
        """See ``Backend.start``."""
        self._sends = sends

    def register(self, region: Region) -> int:
        """See ``Backend.register``; a receiving side must name the region's file."""
        if self._sends is None:
            message = "register was called before start"
            raise BackendError(message)
        check_region(region, self._regions)
        if region.path is not None:
            self._hold(region, region.path)
        elif not self._sends:
            message = "loopback can only receive into a file in /dev/shm; the region names none"
            raise InvalidTransferError(message)
        buffer = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
        self.memory.append(np.ctypeslib.as_array(buffer))
        self._regions.append(region)
        return len(self._regions) - 1

    def endpoint(self) -> bytes:
        """See ``Backend.endpoint``."""
        regions = [_RemoteRegion(region.path or "", region.size_bytes) for region in self._regions]
        if not all(region.path for region in regions):
            message = "a region without a file in /dev/shm cannot be written into by others"
            raise BackendError(message)
        return msgspec.msgpack.encode(_Endpoint(self.agent, tuple(regions)))

    def connect(self, peer: str, endpoint: bytes) -> Link:
        """See ``Backend.connect``."""
        if not self._sends:
            message = "connect needs an engine started with sends=True"
            raise BackendError(message)
        try:
            remote = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"the endpoint of {peer} is not one of loopback: {error}"
            raise ConnectError(message) from error
        try:
            fault = self.faults.strikes("connect", peer)
        except BackendError as error:
            raise ConnectError(str(error)) from error
        if fault is not None:
            _strike_connect(fault, peer)
        link = LoopbackLink(self, peer, _map_regions(peer, remote))
        if not link.peer_alive():
            link.fence()
            message = f"{peer} is gone: nobody holds its memory"
            raise ConnectError(message)
        self._links.append(link)
        return link

    def close(self) -> None:
        """See ``Backend.close``."""
        self._sends = None
        for link in self._links:
            link.fence()
        self._links.clear()
        self.memory.clear()
        self._regions.clear()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _hold(self, region: Region, path: str) -> None:
        """Hold the lock that says that we live, on the file that must be behind ``region``."""
        descriptor = open_shared(path, region.size_bytes)
        if not maps_file(region, os.fstat(descriptor).st_ino):
            os.close(descriptor)
            message = f"the region at {region.address:#x} is not a mapping of {path!r}"
            raise InvalidTransferError(message)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        self._descriptors.append(descriptor)


def _map_regions(peer: str, remote: _Endpoint) -> list[_PeerRegion]:
    """Map all regions of a peer, or none.

    Raises:
        ConnectError: one of them cannot be used.

    """
    regions: list[_PeerRegion] = []
    try:
        for region in remote.regions:
            regions.append(_PeerRegion(region))  # noqa: PERF401 - what was mapped must be known when one fails
    except InvalidTransferError as error:
        for mapped in regions:
            mapped.close()
        message = f"the memory of {peer} cannot be used: {error}"
        raise ConnectError(message) from error
    return regions


def _strike_connect(fault: Fault, peer: str) -> NoReturn:
    """Let a fault on connect happen."""
    if fault.kind == "hang":
        _hang()
    if fault.kind == "crash":
        os.abort()
    message = f"scripted fault {fault.kind!r} at the connect to {peer}"
    raise ConnectError(message)


def _hang() -> NoReturn:
    """Never return, as a native call that lost its way."""
    threading.Event().wait()
    raise AssertionError


def _gone(peer: str) -> PeerDisconnectedError:
    """The error for a peer that is not there any more."""
    return PeerDisconnectedError(f"{peer} is gone, or the link to it was fenced; connect anew")


def _grid_view(buffer: Bytes | mmap.mmap, grid: Grid) -> Bytes:
    """The blocks of a checked grid as rows: uint8, ``(count, block_bytes)``."""
    return np.ndarray(
        (grid.count, grid.block_bytes), np.uint8, buffer, grid.offset_bytes, (grid.stride_bytes, 1)
    )


def _as_slice(blocks: BlockIndex) -> slice | None:
    """The slice that takes the same rows, when the numbers rise by one; else ``None``."""
    first, count = int(blocks[0]), blocks.size
    if int(blocks[-1]) - first == count - 1 and (count <= 1 or bool((np.diff(blocks) == 1).all())):
        return slice(first, first + count)
    return None
