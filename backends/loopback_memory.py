"""The memory of a loopback peer: how an endpoint names it, how it is mapped, who holds it.

Whoever registers a file opens a gate on it (``backends.gate``), which the kernel shuts when the last
process that has the descriptor dies; so a process that registered must not be forked. A sender goes
through it for each copy. A gate that is shut and empty is the proof that nobody copies into the file
on account of an endpoint that was handed out before.
"""

from __future__ import annotations

import mmap
import os
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from backends.base import ConnectError, InvalidTransferError, Region
from backends.gate import Gate, Passage
from backends.memory import maps_file, open_shared


class RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer finds it; ``gate`` is the number of its owner's gate."""

    path: Annotated[str, Meta(max_length=255)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]
    gate: Annotated[int, Meta(ge=0, lt=2**40)] = 0


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
        self._passage = Passage(self._descriptor, remote.gate)

    def alive(self) -> bool:
        """Whether its owner is there and has not cut the file short (we would crash on a write)."""
        return self._is_whole() and self._passage.is_open()

    def enter(self) -> bool:
        """Go in, to copy; false when there is nobody to copy to."""
        return self._is_whole() and self._passage.enter()

    def leave(self) -> None:
        """The copy is over. Calling it twice is fine."""
        self._passage.leave()

    def close(self) -> None:
        """Unmap it; the caller sees to it that nothing copies any more."""
        self.memory.close()
        self._passage.close()

    def _is_whole(self) -> bool:
        return os.fstat(self._descriptor).st_size == self._size_bytes


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


def open_gate(region: Region, path: str) -> Gate:
    """Open a gate on the file that must be behind ``region``.

    Raises:
        InvalidTransferError: the path is not acceptable, or the region is not a mapping of it.

    """
    descriptor = open_shared(path, region.size_bytes)
    if not maps_file(region, os.fstat(descriptor).st_ino):
        os.close(descriptor)
        message = f"the region at {region.address:#x} is not a mapping of {path!r}"
        raise InvalidTransferError(message)
    return Gate(descriptor)
