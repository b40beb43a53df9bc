"""Endpoints: the pool registered once, and what a sender needs to reach it."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from backends import registry
from backends.base import BackendError, BackendUnavailableError, ConnectError, Grid, Part, Status
from backends.loopback import LoopbackBackend
from backends.nixl import NixlBackend
from coordinator.client import DecodeRank, Endpoint, KVPool
from coordinator.errors import PoolError
from tests.backends.rigs import HAS_NIXL
from tests.client.peer import LAYOUT, Peer
from tests.support.descriptors import open_files


def test_what_is_written_to_the_endpoint_lands_in_the_pool() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool, KVPool.allocate(LAYOUT, 8) as source:
        with Endpoint(pool, backend="loopback") as endpoint:
            assert (endpoint.pool, endpoint.name) == (pool, "loopback")
            sender = registry.load("loopback")("sender", {})
            sender.start(sends=True)
            sender.register(source.regions[0])
            link = sender.connect("d/0", endpoint.address)
            grid = Grid(0, 0, 256, 256, 32)
            source.tensor.view(-1)[256 * 3 : 256 * 4] = 7
            blocks = np.array([3], np.int32), np.array([9], np.int32)
            transfer = link.write([Part(grid, blocks[0], grid, blocks[1])])
            while transfer.poll() is Status.MOVING:
                pass
            assert transfer.status is Status.DONE
            sender.close()
        assert pool.tensor.view(-1)[256 * 9 : 256 * 10].tolist() == [7] * 256
        assert int(pool.tensor.count_nonzero()) == 256


def test_an_unknown_backend_is_named() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool, pytest.raises(BackendUnavailableError, match="carrier-pigeon"):
        Endpoint(pool, backend="carrier-pigeon")


def test_a_wrong_option_is_refused() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool, pytest.raises(BackendError, match="speed"):
        Endpoint(pool, backend="loopback", options={"speed": 11})


def test_a_closed_pool_is_refused() -> None:
    pool = KVPool.allocate(LAYOUT, 8)
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        Endpoint(pool, backend="loopback")


def test_closing_twice_is_fine() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool:
        endpoint = Endpoint(pool, backend="loopback")
        endpoint.close()
        endpoint.close()


@pytest.mark.nixl
@pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed")
def test_an_endpoint_that_cannot_be_closed_is_closed_by_another_call() -> None:
    """Until then it is written into, by the leave of its gate; and nobody is told that it is closed."""
    with KVPool.wrap([torch.zeros(2, 8, 256, dtype=torch.uint8) for _ in range(2)], LAYOUT) as pool:
        endpoint = Endpoint(pool)
        backend, gate = endpoint._backend, endpoint._gate
        assert isinstance(backend, NixlBackend)
        assert backend._receiver is not None
        assert gate is not None
        holder = [backend._receiver._native]
        for _ in range(2):
            with pytest.raises(BackendError, match="the engine cannot be destroyed"):
                endpoint.close()
            assert Path(gate.path).exists()
        holder.clear()
        endpoint.close()
        assert not Path(gate.path).exists()
        assert backend.silent()
        endpoint.close()


def test_it_is_closed_at_the_end_of_its_block() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool:
        before = open_files()
        with Endpoint(pool, backend="loopback") as endpoint:
            assert open_files() > before
        assert open_files() == before
        sender = LoopbackBackend("sender", {})
        sender.start(sends=True)
        with pytest.raises(ConnectError, match="nobody holds"):
            sender.connect("d/0", endpoint.address)
        sender.close()


def test_clients_that_are_gone_are_not_remembered(peer: Peer) -> None:
    """A decode engine joins and leaves prefill nodes for weeks."""
    with KVPool.allocate(LAYOUT, 8) as pool, Endpoint(pool, backend="loopback") as endpoint:
        for _ in range(10):
            DecodeRank.connect(peer.control, group="g", rank=0, world_size=1, endpoint=endpoint).close()
            gc.collect()
        assert len(endpoint._followers) == 1
