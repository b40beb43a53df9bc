"""The same fault ends with the same error on NIXL and on Mooncake, so that it has the same reason above."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.base import BackendError, Link, Status
from tests.backends.rigs import (
    LARGE_BYTES,
    Peer,
    Rig,
    held_up,
    make_rig,
    needs_mooncake,
    needs_nixl,
    until_terminal,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from backends.base import Transfer
    from tests.backends.memory import SharedMemory

pytestmark = [*needs_nixl, *needs_mooncake]

MIB: Final = 1 << 20
#: Short, because the story waits for each of them.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "nixl": {"tcp_user_timeout_s": 2, "connect_timeout_s": 1},
    "mooncake": {"peer_timeout_s": 2, "connect_timeout_s": 1},
}
EXPECTED: Final = {
    "memory that the peer did not register": "TransferError",
    "fenced in the middle": "PeerDisconnectedError",
    "written after the fence": "PeerDisconnectedError",
    "stopped, when connecting": "ConnectError",
    "stopped for good, in the middle": "PeerDisconnectedError",
    "dead, in the middle": "PeerDisconnectedError",
    "dead before, and the link is open": "PeerDisconnectedError",
    "dead before, when connecting": "ConnectError",
    "our backend closed": "PeerDisconnectedError",
}


def test_the_same_fault_has_the_same_error(tmp_path: Path, make_memory: Callable[..., SharedMemory]) -> None:
    """Cases C07, C10, C11, C15."""
    rigs = [make_rig(name, options, tmp_path) for name, options in OPTIONS.items()]
    ours = make_memory(LARGE_BYTES)
    with ThreadPoolExecutor() as threads:
        stories = list(threads.map(lambda rig: story(rig, ours), rigs))

    assert dict(zip(OPTIONS, stories, strict=True)) == dict.fromkeys(OPTIONS, EXPECTED)


def story(rig: Rig, ours: SharedMemory) -> dict[str, str]:
    """Let all faults happen to one peer, one after the other; the error of each."""
    ends: dict[str, str] = {}
    backend = rig.backend()
    backend.start(sends=True)
    backend.register(ours.region)
    peer = Peer(rig, LARGE_BYTES)

    def connect() -> Link:
        return backend.connect("peer", peer.endpoint)

    try:
        ends["memory that the peer did not register"] = error_of(
            lambda: backend.connect("peer", lying(peer.endpoint)).write([whole(LARGE_BYTES)])
        )

        link = connect()
        with held_up(rig, peer, link) as transfer:
            link.fence()
            ends["fenced in the middle"] = error_of(lambda: transfer)
            ends["written after the fence"] = error_of(lambda: link.write([whole(MIB)]))

        link = connect()
        with held_up(rig, peer, link) as transfer:
            ends["stopped, when connecting"] = error_of(connect)
            ends["stopped for good, in the middle"] = error_of(lambda: transfer)

        link, other = connect(), connect()
        with held_up(rig, peer, link) as transfer:
            peer.kill()
            ends["dead, in the middle"] = error_of(lambda: transfer)
        ends["dead before, and the link is open"] = error_of(lambda: other.write([whole(MIB)]))
        ends["dead before, when connecting"] = error_of(connect)
        backend.close()
        ends["our backend closed"] = error_of(lambda: link.write([whole(MIB)]))
    finally:
        backend.close()
        peer.close()
    return ends


def error_of(call: Callable[[], Transfer | Link]) -> str:
    """Name the class of the error with which a call, or the transfer that it returns, ends."""
    try:
        made = call()
    except BackendError as error:
        return type(error).__name__
    if isinstance(made, Link):
        return "connected"
    if until_terminal(made) is Status.FAILED:
        return type(made.error).__name__
    return made.status.value


def lying(endpoint: bytes) -> bytes:
    """The endpoint, with region 0 half out of what is registered."""

    def lie(fields: Any) -> Any:  # noqa: ANN401 - both kinds of endpoints have regions of [address, size, ...]
        if isinstance(fields, list) and fields and isinstance(fields[0], list):
            (address, *rest), *others = fields
            return [[address + LARGE_BYTES // 2, *rest], *others]
        return fields

    return msgspec.msgpack.encode([lie(fields) for fields in msgspec.msgpack.decode(endpoint)])
