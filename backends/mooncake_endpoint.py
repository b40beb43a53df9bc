"""What a mooncake endpoint says."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from backends.base import ConnectError
from backends.mooncake_presence import INCARNATION_BYTES

#: Engines of one receiving side, at most.
MAX_ENGINES: Final = 16
Port = Annotated[int, Meta(ge=1, le=65535)]


class RemoteEngine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An engine that takes writes.

    Attributes:
        port: where it is called.
        data_port: where its connections are made; 0 with RDMA.

    """

    port: Port
    data_port: Annotated[int, Meta(ge=0, le=65535)]


class RemoteRegion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered region, as a peer addresses it."""

    address: Annotated[int, Meta(ge=1, le=2**62)]
    size_bytes: Annotated[int, Meta(ge=1, le=2**62)]


class Endpoint(Struct, frozen=True, array_like=True, tag="mooncake", forbid_unknown_fields=True):
    """What ``endpoint()`` returns, as msgpack.

    Attributes:
        agent: the backend's name.
        protocol: how its engines are reached.
        host: an IPv4 address.
        engines: all of them take writes to all regions.
        presence_port: where it says whether it is still ``incarnation``.
        incarnation: random bytes that no other process has.
        regions: in the order of their registration.
        scrap: address of a few bytes that a new link reads, to make its connections.

    """

    agent: Annotated[str, Meta(max_length=255)]
    protocol: Literal["tcp", "rdma"]
    host: Annotated[str, Meta(max_length=15)]
    engines: Annotated[tuple[RemoteEngine, ...], Meta(min_length=1, max_length=MAX_ENGINES)]
    presence_port: Port
    incarnation: Annotated[bytes, Meta(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)]
    regions: Annotated[tuple[RemoteRegion, ...], Meta(max_length=4096)]
    scrap: Annotated[int, Meta(ge=1, le=2**62)]

    def __post_init__(self) -> None:
        """Refuse a host that is no address: the engine would look any name up."""
        ipaddress.IPv4Address(self.host)

    def name(self, engine: RemoteEngine) -> str:
        """How other engines call one of its engines."""
        return f"{self.host}:{engine.port}"


def decode(peer: str, endpoint: bytes) -> Endpoint:
    """Read what a peer's ``endpoint()`` returned.

    Raises:
        ConnectError: it is damaged or of another backend.

    """
    try:
        return msgspec.msgpack.decode(endpoint, type=Endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the endpoint of {peer} is not one of mooncake: {error}"
        raise ConnectError(message) from error
