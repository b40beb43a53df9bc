"""The memory of a loopback peer: how an endpoint names it, how it is mapped, who holds it.

How a dead peer is noticed: whoever registers a file holds a shared ``flock`` on it, which the
kernel drops when the last process that has the descriptor dies. A sender that is given the
exclusive lock knows that nobody is there. So a process that registered must not be forked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from backends.base import ConnectError, InvalidTransferError, Region
from backends.memory import maps_file, open_shared


class RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer finds it."""

    path: Annotated[str, Meta(max_length=255)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]


class Endpoint(Struct, frozen=True, array_like=True, tag="loopback", forbid_unknown_fields=True):
    """What ``LoopbackBackend.endpoint`` returns, as msgpack."""

    agent: Annotated[str, Meta(max_length=255)]
    regions: Annotated[tuple[RemoteRegion, ...], Meta(max_length=4096)]


class PeerRegion:
    """A region of a peer, mapped here.

    Raises:
        InvalidTransferError: its file is not what the endpoint says.

    """

    def __init__(self, remote: RemoteRegion) -> None:
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


def map_regions(peer: str, endpoint: bytes) -> list[PeerRegion]:
    """Map all regions that a peer's endpoint names, or none.

    Raises:
        ConnectError: the endpoint is not one of loopback, or a region cannot be used.

    """
    try:
        remote = msgspec.msgpack.decode(endpoint, type=Endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the endpoint of {peer} is not one of loopback: {error}"
        raise ConnectError(message) from error
    regions: list[PeerRegion] = []
    try:
        for region in remote.regions:
            regions.append(PeerRegion(region))  # noqa: PERF401 - what was mapped must be known when one fails
    except InvalidTransferError as error:
        for mapped in regions:
            mapped.close()
        message = f"the memory of {peer} cannot be used: {error}"
        raise ConnectError(message) from error
    return regions


def hold(region: Region, path: str) -> int:
    """Take the lock that says that we live, on the file that must be behind ``region``.

    Returns the descriptor that holds it; closing it lets go.

    Raises:
        InvalidTransferError: the path is not acceptable, or the region is not a mapping of it.

    """
    descriptor = open_shared(path, region.size_bytes)
    if not maps_file(region, os.fstat(descriptor).st_ino):
        os.close(descriptor)
        message = f"the region at {region.address:#x} is not a mapping of {path!r}"
        raise InvalidTransferError(message)
    # A sender that probes has it for microseconds: wait.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
