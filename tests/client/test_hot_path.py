"""What the engine's thread pays in each scheduler step."""

from __future__ import annotations

import subprocess
import sys
import timeit
from typing import TYPE_CHECKING

from coordinator.client import Outcome
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.client import PrefillRank
    from tests.client.conftest import Connect
    from tests.client.peer import Peer

NUMBER = 5_000


def cost_ns(call: Callable[[], object]) -> float:
    """The best of many rounds: what the call costs when nobody else takes the processor."""
    return min(timeit.repeat(call, number=NUMBER, repeat=20)) / NUMBER * 1e9


def idle(rank: PrefillRank) -> float:
    """Cost of a drain that finds nothing."""

    def quiet() -> bool:
        rank.drain()
        return not rank._conversation.news

    eventually(quiet, 10, "no news")
    return cost_ns(rank.drain)


def test_draining_nothing_is_cheap_however_much_is_in_flight(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    assert idle(rank) < 500
    for room in range(1, 10_001):
        rank.open(room)
    eventually(lambda: not len(rank._conversation.outbox), 30, "all confirmed")
    assert idle(rank) < 500
    head = rank.head
    rank.drain(through=head)
    assert cost_ns(lambda: rank.drain(through=head)) < 500


def test_draining_nothing_touches_neither_lock_nor_descriptor(peer: Peer, connect: Connect) -> None:
    rank = connect(peer.control)
    rank.wait_ready(10)
    peer.publish("prefill", Outcome(1, 1))
    eventually(lambda: peer.acknowledged("prefill") == 1, 10, "the acknowledgement")
    with rank._io._lock:
        rank._conversation.drain(None)
        # Held by us: whoever wants it now would wait for ever.
        assert not rank.drain()


def test_torch_and_engines_are_imported_by_who_uses_them() -> None:
    program = """
import sys
import coordinator.client
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "nixl", "mooncake", "pydantic"}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
