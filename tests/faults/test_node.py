"""A whole prefill node is gone, or out of reach: what its decode ranks make of that, all in one step."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import Outcome, RankState, Reason
from tests.client.deployment import SETTINGS, Deployment, moving
from tests.support.faults import Faults, Line, kill
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.processes import Programs

pytestmark = pytest.mark.usefixtures("short_hold")

PREFILL = """
import sys, time
from coordinator.client import KVPool, PrefillRank
from tests.client.peer import LAYOUT
address, rooms = sys.argv[1], [int(room) for room in sys.argv[2:]]
pools = [KVPool.allocate(LAYOUT, 16, 2) for _ in range(2)]
ranks = [
    PrefillRank.connect(address, group="p2", rank=number, world_size=2, pool=pool)
    for number, pool in enumerate(pools)
]
for rank in ranks:
    rank.wait_ready(30)
for room in rooms:
    for rank in ranks:
        rank.send(room, [room])
print("prefilling", flush=True)
time.sleep(1000)
"""


class Node(Deployment):
    """A deployment whose decode ranks reach it over a line that a test can cut."""

    line: Line


@pytest.fixture
def node(programs: Programs, short_dir: Path) -> Iterator[Node]:
    with ExitStack() as stack, Faults() as faults:
        line = faults.line(f"ipc://{short_dir}/control", f"ipc://{short_dir}/outcomes")
        node = Node(programs, short_dir, stack, "loopback", lambda _: line.address)
        node.line = line
        yield node


def decode_loses(node: Node, rooms: list[int]) -> None:
    """Let decode make steps until it has lost the coordinator: these rooms fail in one step, each once."""

    def lost() -> bool:
        node.decode.step()
        return Reason.COORDINATOR_LOST in node.decode.outcomes().values()

    eventually(lost, 25, "decode has lost the coordinator")
    (step,) = [step for step in node.decode.steps if any(event.room in rooms for event in step)][:1]
    assert [event.room for event in step if isinstance(event, Outcome)] == rooms
    assert {node.decode.outcomes()[room, 1] for room in rooms} == {Reason.COORDINATOR_LOST}


def decode_is_released(node: Node, rooms: list[int]) -> None:
    """Let decode make steps until it has its pages back."""

    def released() -> bool:
        node.decode.step()
        return {room for room, _ in node.decode.released()} >= set(rooms)

    eventually(released, 25, "decode has its pages back")


def test_the_whole_node_vanishes(node: Node, programs: Programs) -> None:
    """The coordinator, its workers and the ranks of prefill are killed together."""
    node.hand_over(1, 1)
    rooms = [3, 4, 5]
    prefill = programs.start(sys.executable, "-c", PREFILL, node.address, *map(str, rooms))
    prefill.says("prefilling", 30)
    for room in (*rooms, 9):
        node.offer(room, room)
    eventually(lambda: not any(len(rank._conversation.outbox) for rank in node.decode.ranks), 10, "confirmed")
    for rank in node.prefill.ranks:
        rank.close()
    kill(node.coordinator.program)
    kill(prefill)
    killed_s = time.monotonic()
    decode_loses(node, [*rooms, 9])
    assert 0 < time.monotonic() - killed_s - (SETTINGS.coordinator_lost_s - 0.5) < 10.0
    decode_is_released(node, [*rooms, 9])
    assert [rank.state for rank in node.decode.ranks] == [RankState.CONNECTING] * 2


@pytest.mark.parametrize("fault", ["refuse", "stall", "vanish"])
def test_the_node_is_cut_off_and_comes_back_after_the_verdict(node: Node, fault: str) -> None:
    """Nothing that arrives late changes anything: neither words nor bytes."""
    node.hand_over(1, 1)
    for pool in node.prefill.pools:
        pool.tensor[:, 2:4] = 99
    node.coordinator.stall()
    node.offer(2, 2)
    node.send(2, 2)
    eventually(lambda: moving(node), 10, "the workers have begun to write")
    line = node.line
    if fault == "vanish":
        # The connections have died without a word, and nobody answers a new one.
        line.control.down.stall(after_bytes=1)
        line.outcomes.down.stall(after_bytes=1)
        line.vanish()
    elif fault == "stall":
        line.stall()
    else:
        line.refuse()
    node.offer(3, 3)
    node.send(3, 3)
    decode_loses(node, [2, 3])
    decode_is_released(node, [2, 3])
    node.run(lambda: (2, 1) in node.prefill.outcomes(), "prefill has a verdict, too")
    assert node.prefill.outcomes()[2, 1] is Reason.PEER_LOST
    before = [pool.tensor.clone() for pool in node.decode.pools]
    heard = dict(node.decode.outcomes())
    node.coordinator.flow()
    line.heal()
    node.ready()
    node.run(lambda: len(node.prefill.released()) >= 2, "prefill has its pages back")
    for pool, tensor in zip(node.decode.pools, before, strict=True):
        assert torch.equal(pool.tensor, tensor), "bytes of a former life have landed"
    node.hand_over(4, 4)
    assert {key: node.decode.outcomes()[key] for key in heard} == heard
    assert {room for room, _ in node.decode.outcomes()} == {1, 2, 3, 4}
