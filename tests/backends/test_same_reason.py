"""The same fault ends with the same error on NIXL and on Mooncake, so that it has the same reason above."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from backends.base import BackendError, Link, Status
from tests.backends.crooked import crooked
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

    from backends.base import Backend, Transfer
    from tests.backends.memory import SharedMemory

pytestmark = [*needs_nixl, *needs_mooncake]

MIB: Final = 1 << 20
#: Short, because the story waits for each of them.
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "nixl": {"tcp_user_timeout_s": 3, "connect_timeout_s": 8},
    "mooncake": {"peer_timeout_s": 3, "connect_timeout_s": 8},
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
    "too many outstanding": "TransferError",
    "restarted, over the open link": "PeerDisconnectedError",
    "restarted, connecting to where it was": "ConnectError",
    "restarted, connecting to where it is": "connected",
    "our backend closed in the middle": "PeerDisconnectedError",
    "our backend closed": "PeerDisconnectedError",
    "connecting to an endpoint of nothing": "ConnectError",
    "connecting to a damaged endpoint": "ConnectError",
    "a write of no blocks": "InvalidTransferError",
    "a write outside of the memory": "InvalidTransferError",
}


def test_the_same_fault_has_the_same_error(tmp_path: Path, make_memory: Callable[..., SharedMemory]) -> None:
    """Cases C07, C10, C11, C15: every fault of the contract suite."""
    rigs = [make_rig(name, options, tmp_path) for name, options in OPTIONS.items()]
    ours = make_memory(LARGE_BYTES)
    with ThreadPoolExecutor() as threads:
        stories = list(threads.map(lambda rig: story(rig, ours), rigs))

    assert dict(zip(OPTIONS, stories, strict=True)) == dict.fromkeys(OPTIONS, EXPECTED)


def story(rig: Rig, ours: SharedMemory) -> dict[str, str]:
    """Let all faults happen, one after the other; the error of each."""
    backend = rig.backend()
    backend.start(sends=True)
    backend.register(ours.region)
    peers = [Peer(rig, LARGE_BYTES)]
    try:
        return {
            **of_mistakes(backend, peers[0]),
            **of_a_full_link(rig, backend, peers[0]),
            **of_stops(rig, backend, peers[0]),
            **of_a_death(rig, backend, peers[0]),
            **of_a_restart(rig, backend, peers),
            **of_our_end(rig, backend, peers[-1]),
        }
    finally:
        backend.close()
        for peer in peers:
            peer.close()


def of_mistakes(backend: Backend, peer: Peer) -> dict[str, str]:
    """Calls that are wrong."""
    link = backend.connect("peer", peer.endpoint)
    damaged = peer.endpoint[: len(peer.endpoint) // 2]
    lie = crooked(peer.endpoint, "half out of what is registered", LARGE_BYTES)
    return {
        "a write of no blocks": error_of(lambda: link.write([])),
        "a write outside of the memory": error_of(lambda: link.write([whole(2 * LARGE_BYTES)])),
        "connecting to an endpoint of nothing": error_of(lambda: backend.connect("peer", b"")),
        "connecting to a damaged endpoint": error_of(lambda: backend.connect("peer", damaged)),
        "memory that the peer did not register": error_of(
            lambda: backend.connect("peer", lie).write([whole(LARGE_BYTES)])
        ),
    }


def of_a_full_link(rig: Rig, backend: Backend, peer: Peer) -> dict[str, str]:
    """One write more than declared; then a fence."""
    ends = {}
    link = backend.connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        for _ in range(backend.capabilities.max_outstanding_per_peer - 1):
            link.write([whole(2 * MIB)])
        ends["too many outstanding"] = error_of(lambda: link.write([whole(2 * MIB)]))
        link.fence()
        ends["fenced in the middle"] = error_of(lambda: transfer)
        ends["written after the fence"] = error_of(lambda: link.write([whole(MIB)]))
    return ends


def of_stops(rig: Rig, backend: Backend, peer: Peer) -> dict[str, str]:
    """The peer is stopped for longer than it may be."""
    ends = {}
    link = backend.connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        ends["stopped, when connecting"] = error_of(lambda: backend.connect("peer", peer.endpoint))
        ends["stopped for good, in the middle"] = error_of(lambda: transfer)
    return ends


def of_a_death(rig: Rig, backend: Backend, peer: Peer) -> dict[str, str]:
    """The peer is killed."""
    ends = {}
    link, other = (backend.connect("peer", peer.endpoint) for _ in range(2))
    with held_up(rig, peer, link) as transfer:
        peer.kill()
        ends["dead, in the middle"] = error_of(lambda: transfer)
    ends["dead before, and the link is open"] = error_of(lambda: other.write([whole(MIB)]))
    ends["dead before, when connecting"] = error_of(lambda: backend.connect("peer", peer.endpoint))
    return ends


def of_a_restart(rig: Rig, backend: Backend, peers: list[Peer]) -> dict[str, str]:
    """The peer is killed, and another process takes its place."""
    former = Peer(rig, LARGE_BYTES)
    peers.append(former)
    link = backend.connect("peer", former.endpoint)
    former.kill()
    successor = Peer(rig, LARGE_BYTES)
    peers.append(successor)
    return {
        "restarted, over the open link": error_of(lambda: link.write([whole(MIB)])),
        "restarted, connecting to where it was": error_of(lambda: backend.connect("peer", former.endpoint)),
        "restarted, connecting to where it is": error_of(lambda: backend.connect("peer", successor.endpoint)),
    }


def of_our_end(rig: Rig, backend: Backend, peer: Peer) -> dict[str, str]:
    """We end while something moves."""
    ends = {}
    link = backend.connect("peer", peer.endpoint)
    with held_up(rig, peer, link) as transfer:
        backend.close()
        ends["our backend closed in the middle"] = error_of(lambda: transfer)
        ends["our backend closed"] = error_of(lambda: link.write([whole(MIB)]))
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
