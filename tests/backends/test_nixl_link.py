"""When a link is inside its peer's gate, without an engine: requests end as the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from backends.base import BackendError, Grid, Part, PeerDisconnectedError, Region, Status
from backends.gate import Gate, Passage
from backends.memory import open_shared
from backends.nixl_link import NixlLink, RemoteRegion
from tests.backends.memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import Transfer
    from backends.nixl_engine import Agent
    from backends.nixl_link import Endpoint

SIZE = 4096


class HandAgent:
    """Keeps every request until the test ends it."""

    prepared_count = 0

    def __init__(self) -> None:
        self.moving: list[int] = []
        self.made = 0
        self.error: BackendError | None = None
        self.destroy_error: BackendError | None = None

    def add_peer(self, _: bytes) -> str:
        return "remote"

    def prepare(self, *_: object) -> int:
        return 1

    def make(self, *_: object) -> int:
        if self.error is not None:
            raise self.error
        self.made += 1
        return self.made

    def post(self, request: int) -> bool:
        self.moving.append(request)
        return False

    def done(self, request: int) -> bool:
        if self.error is not None:
            raise self.error
        return request not in self.moving

    def release(self, requests: list[int]) -> None:
        assert not set(requests) & set(self.moving)

    def destroy(self) -> None:
        if self.destroy_error is not None:
            raise self.destroy_error
        self.moving.clear()


class Bench:
    """A link to a peer whose gate is looked at."""

    def __init__(self, path: str) -> None:
        self.gate = Gate(open_shared(path, SIZE))
        self.agent = HandAgent()
        remote = SimpleNamespace(metadata=b"", regions=[RemoteRegion(1 << 40, SIZE, "host", 0)])
        self.link = NixlLink(
            "peer",
            cast("Agent", self.agent),
            [Region(1 << 30, SIZE)],
            cast("Endpoint", remote),
            Passage.at(path, SIZE, self.gate.number),
        )

    def write(self) -> Transfer:
        grid, numbers = Grid(0, 0, 64, 64, 64), np.array([1], np.int32)
        return self.link.write([Part(grid, numbers, grid, numbers)])


@pytest.fixture
def bench() -> Iterator[Bench]:
    memory = SharedMemory(SIZE)
    made = Bench(memory.path)
    yield made
    made.agent.destroy_error = None
    made.link.fence()
    made.gate.close()
    memory.remove()


def test_it_is_inside_until_the_last_of_its_writes_is_done(bench: Bench) -> None:
    first, second = bench.write(), bench.write()
    bench.agent.moving.remove(1)
    assert first.poll() is Status.DONE
    bench.gate.shut()
    assert not bench.gate.is_empty(), "the second moves"
    assert isinstance(_fails(second), PeerDisconnectedError)
    assert bench.gate.is_empty()


def test_it_leaves_when_all_is_done_and_comes_back_for_the_next(bench: Bench) -> None:
    for number in (1, 2):
        transfer = bench.write()
        bench.agent.moving.remove(number)
        assert transfer.poll() is Status.DONE
    bench.gate.shut()
    assert bench.gate.is_empty()


def test_what_cannot_be_made_leaves_nobody_inside(bench: Bench) -> None:
    bench.agent.error = BackendError("no such memory")
    with pytest.raises(BackendError, match="no such memory"):
        bench.write()
    bench.gate.shut()
    assert bench.gate.is_empty()


def test_what_cannot_be_made_leaves_those_inside_that_move(bench: Bench) -> None:
    bench.write()
    bench.agent.error = BackendError("no such memory")
    with pytest.raises(BackendError, match="no such memory"):
        bench.write()
    bench.gate.shut()
    assert not bench.gate.is_empty()


def test_a_write_that_failed_stays_inside_until_its_link_is_fenced(bench: Bench) -> None:
    transfer = bench.write()
    bench.agent.error = BackendError("something is wrong")
    assert "something is wrong" in str(_fails(transfer))
    assert not transfer.settled
    bench.gate.shut()
    assert not bench.gate.is_empty(), "the engine may still copy"
    bench.link.fence()
    assert bench.gate.is_empty()


def test_who_is_not_fenced_stays_inside(bench: Bench) -> None:
    transfer = bench.write()
    bench.agent.destroy_error = BackendError("the engine is stuck")
    bench.gate.shut()
    assert isinstance(_fails(transfer), PeerDisconnectedError)
    assert not transfer.settled
    assert not bench.gate.is_empty()


def test_nothing_is_posted_to_a_peer_that_has_shut_its_gate(bench: Bench) -> None:
    bench.gate.shut()
    with pytest.raises(PeerDisconnectedError, match="has shut its memory"):
        bench.write()
    assert bench.agent.made == 0
    assert bench.gate.is_empty()


def _fails(transfer: Transfer) -> BackendError | None:
    """Ask after a transfer that must have failed; why it has."""
    assert transfer.poll() is Status.FAILED
    return transfer.error
