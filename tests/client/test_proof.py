"""When pages of a lost coordinator's handoffs are quiet: locks on the pool, and endpoints renewed."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from backends import registry
from backends.base import (
    BackendError,
    Grid,
    InvalidTransferError,
    Part,
    PeerDisconnectedError,
    Region,
    Status,
)
from backends.loopback import LoopbackBackend
from coordinator.client import Endpoint, KVPool
from coordinator.client.hosting import Hosting
from coordinator.client.introduction import introduction
from coordinator.client.proof import DestinationProof, SourceProof
from coordinator.client.segment import Segment
from coordinator.errors import PoolBusyError
from coordinator.messages import Role
from coordinator.worker.memory import MappedPool
from tests.backends.rigs import needs_mooncake, needs_nixl
from tests.client.peer import LAYOUT
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import Link

FORMER, PRESENT = 2**62 + 1, 77


@pytest.fixture
def pool() -> Iterator[KVPool]:
    with KVPool.allocate(LAYOUT, 8) as made:
        yield made


def worker(pool: KVPool, instance: int) -> MappedPool:
    """What a worker does first."""
    return MappedPool(pool.path, pool.size_bytes, instance)


def source_proof(pool: KVPool) -> SourceProof:
    """The proof of a rank that runs no worker itself."""
    hello = introduction(Role.PREFILL, "ipc:///nowhere", "p", 0, 1, pool)
    return SourceProof(pool, Hosting(pool, hello, "ipc:///nowhere", None))


# --- a pool that is sent from ----------------------------------------------------------------


def test_a_pool_that_nobody_has_is_quiet_and_stays_so(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that lives may start another worker for the life that is over: that must not happen."""
    monkeypatch.setattr("coordinator.worker.memory.LOCK_S", 0.1)
    proof = source_proof(pool)
    assert proof.holds(PRESENT)
    assert proof.holds(PRESENT)
    with pytest.raises(PoolBusyError):
        worker(pool, FORMER)
    proof.welcomed()
    worker(pool, PRESENT).close()


def test_a_former_worker_that_lives_may_read_the_pool(pool: KVPool) -> None:
    proof = source_proof(pool)
    former = worker(pool, FORMER)
    assert not proof.holds(PRESENT)
    former.close()
    assert proof.holds(PRESENT)
    proof.close()


def test_a_worker_of_the_present_life_has_come_after_the_former_one_s_end(pool: KVPool) -> None:
    """It may be faster than we look."""
    proof = source_proof(pool)
    former = worker(pool, FORMER)
    assert not proof.holds(PRESENT)
    former.close()
    present = worker(pool, PRESENT)
    assert proof.holds(PRESENT)
    proof.welcomed()
    assert not source_proof(pool).holds(FORMER)
    present.close()


def test_a_pool_that_cannot_be_looked_at_is_not_known_to_be_quiet(pool: KVPool) -> None:
    Path(pool.path).unlink()
    assert not source_proof(pool).holds(PRESENT)


def test_what_a_proof_holds_it_gives_back_when_it_is_closed(pool: KVPool) -> None:
    proof = source_proof(pool)
    before = open_files()
    proof.welcomed()  # Nothing was ever proven.
    for give_back in (proof.welcomed, proof.close):
        assert proof.holds(PRESENT)
        give_back()
        give_back()
        worker(pool, FORMER).close()
        assert open_files() == before


def test_a_worker_in_the_rank_itself_has_to_have_ended_too(pool: KVPool) -> None:
    hosted: set[int] = {FORMER}
    hosting = SimpleNamespace(serves_only=lambda instance: hosted <= {instance})
    private = KVPool.wrap([torch.zeros(LAYOUT.pool_bytes(8, 1), dtype=torch.uint8)], LAYOUT)
    for kind in (pool, private):
        proof = SourceProof(kind, cast("Hosting", hosting))
        assert not proof.holds(PRESENT)
        assert proof.holds(FORMER)
        proof.close()
    hosted.clear()
    assert SourceProof(private, cast("Hosting", hosting)).holds(PRESENT), "no other process can have it"


def test_a_forked_child_does_not_keep_the_lock(pool: KVPool) -> None:
    proof = source_proof(pool)
    assert proof.holds(PRESENT)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    proof.welcomed()
    worker(pool, PRESENT).close()
    os.write(write, b"x")
    os.waitpid(child, 0)
    for descriptor in (read, write):
        os.close(descriptor)


# --- an endpoint that is written into --------------------------------------------------------

BACKENDS = [
    pytest.param("loopback", {}, id="loopback"),
    pytest.param("nixl", {}, marks=needs_nixl, id="nixl"),
    pytest.param("mooncake", {}, marks=needs_mooncake, id="mooncake"),
]


class Follower:
    """Hears of new addresses."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def moved(self, address: bytes) -> None:
        self.heard.append(address)


@pytest.mark.parametrize(("name", "options"), BACKENDS)
def test_a_renewed_endpoint_is_reached_at_its_new_address_only(
    pool: KVPool, name: str, options: dict[str, object]
) -> None:
    check_renewal(pool, name, options)


@pytest.mark.parametrize(("name", "options"), [case for case in BACKENDS if case.values[0] != "loopback"])
def test_so_it_is_with_memory_that_has_no_file(name: str, options: dict[str, object]) -> None:
    memory = torch.zeros(LAYOUT.pool_bytes(8, 1), dtype=torch.uint8)
    with KVPool.wrap([memory], LAYOUT) as private:
        check_renewal(private, name, options)


def test_the_file_for_the_gate_of_such_memory_is_gone_with_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the endpoint cannot be made: loopback cannot receive there."""
    made: list[Segment] = []

    class Noted(Segment):
        def __init__(self, size_bytes: int) -> None:
            super().__init__(size_bytes)
            made.append(self)

    monkeypatch.setattr("coordinator.client.endpoint.Segment", Noted)
    memory = torch.zeros(LAYOUT.pool_bytes(8, 1), dtype=torch.uint8)
    with KVPool.wrap([memory], LAYOUT) as private, pytest.raises(InvalidTransferError, match="names none"):
        Endpoint(private, "loopback")
    (segment,) = made
    assert not Path(segment.path).exists()


def check_renewal(pool: KVPool, name: str, options: dict[str, object]) -> None:
    """Have an endpoint renewed; who wrote before must connect anew, and it knows when that is over."""
    grid = Grid(0, 0, 256, 256, pool.size_bytes // 256)
    part = Part(grid, np.arange(4, dtype=np.int32), grid, np.arange(4, dtype=np.int32))

    def arrives(link: Link) -> None:
        transfer = link.write([part])
        eventually(lambda: transfer.poll() is not Status.MOVING, 20, "the write ends")
        assert pool.tensor.view(-1)[:1024].tolist() == [7] * 1024

    source = np.full(pool.size_bytes, 7, np.uint8)
    sender = registry.load(name)("sender", options)
    sender.start(sends=True)
    sender.register(Region(source.ctypes.data, source.size))
    with Endpoint(pool, name, options) as endpoint:
        follower = Follower()
        endpoint.follow(follower.moved)
        former = sender.connect("d/0", endpoint.address)
        arrives(former)
        pool.tensor.zero_()
        endpoint.renew(0)
        assert endpoint.renewals == 1
        assert follower.heard == [endpoint.address]
        eventually(endpoint.is_quiet, 20, "nothing lands any more")
        with pytest.raises(PeerDisconnectedError):
            former.write([part])
        assert not pool.tensor.any()
        arrives(sender.connect("d/0 again", endpoint.address))
    sender.close()


def test_an_endpoint_is_renewed_once_for_all_that_had_the_need(pool: KVPool) -> None:
    with Endpoint(pool, "loopback") as endpoint:
        first, second = (DestinationProof(endpoint, Follower().moved) for _ in range(2))
        for proof in (first, second):
            proof.lost()
        first.prepare()
        second.prepare()
        assert endpoint.renewals == 1
        second.lost()
        second.prepare()
        assert endpoint.renewals == 2
        assert all(proof.holds(PRESENT) for proof in (first, second))


def test_a_writer_that_has_begun_is_waited_for(pool: KVPool) -> None:
    sender = LoopbackBackend("sender", {})
    sender.start(sends=True)
    with Endpoint(pool, "loopback") as endpoint:
        link = sender.connect("d/0", endpoint.address)
        region = link._remote[0]  # type: ignore[attr-defined]
        assert region.enter()
        endpoint.renew(0)
        assert not endpoint.is_quiet()
        region.leave()
        assert endpoint.is_quiet()
        assert endpoint.is_quiet()
    sender.close()


def test_who_is_gone_is_not_told(pool: KVPool) -> None:
    with Endpoint(pool, "loopback") as endpoint:
        follower, gone = Follower(), Follower()
        endpoint.follow(follower.moved)
        endpoint.follow(gone.moved)
        del gone
        gc.collect()
        endpoint.renew(0)
        endpoint.renew(1)
        assert len(follower.heard) == 2
        assert len(endpoint._followers) == 1


def test_what_cannot_be_renewed_now_is_tried_again(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint(pool, "loopback") as endpoint:
        before = endpoint.address

        def fail(self: LoopbackBackend, *, sends: bool) -> None:
            message = f"no more ports for {self.agent}, sends={sends}"
            raise BackendError(message)

        with monkeypatch.context() as patch:
            patch.setattr(LoopbackBackend, "start", fail)
            for _ in range(2):
                with pytest.raises(BackendError, match="no more ports"):
                    endpoint.renew(0)
        assert (endpoint.renewals, endpoint.address) == (0, before)
        endpoint.renew(0)
        assert endpoint.renewals == 1
        assert endpoint.address != before
        assert endpoint.is_quiet()


def test_a_closed_endpoint_is_not_renewed(pool: KVPool) -> None:
    endpoint = Endpoint(pool, "loopback")
    endpoint.close()
    endpoint.renew(0)
    assert endpoint.renewals == 0


def test_renewing_leaves_no_descriptor_behind(pool: KVPool) -> None:
    with Endpoint(pool, "loopback") as endpoint:
        before = open_files()
        for number in range(5):
            endpoint.renew(number)
            assert endpoint.is_quiet()
        assert open_files() == before
