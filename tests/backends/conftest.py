"""Rigs, memory and peers for the tests of the backends."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from backends import mooncake_engine, nixl_engine
from tests.backends.memory import SharedMemory
from tests.backends.rigs import LARGE_BYTES, Peer, Rig, make_rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import Backend


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the contract suite run on other backends; needs ``tests/backends`` on the command line."""
    parser.addoption(
        "--backend", action="append", default=[], help="run the contract suite on this backend only"
    )
    parser.addoption("--backend-options", default="{}", help="options of that backend, as JSON")


@pytest.fixture(autouse=True)
def engine_environment() -> Iterator[None]:
    """Undo what a native engine's options do to the environment of this process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    nixl_engine._environment = None
    mooncake_engine._environment = None


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """How to drive the backend under test; ``test_contract`` names the backends."""
    options = json.loads(request.config.getoption("--backend-options", default="{}"))
    return make_rig(request.param, options, tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def steady_peer(rig: Rig) -> Iterator[Peer]:
    """Share one receiving process among the tests that do it no harm: to start one takes a second."""
    peer = Peer(rig, LARGE_BYTES, 3 << 20)
    yield peer
    assert peer.close() == 0


@pytest.fixture
def peer(steady_peer: Peer) -> Peer:
    """A receiving process with two regions of zeros, not to be harmed, nor left with a write."""
    for memory in steady_peer.memory:
        memory.bytes[:] = 0
    return steady_peer


@pytest.fixture
def make_peer(rig: Rig) -> Iterator[Callable[..., Peer]]:
    """Start receiving processes with this; each must end in good order, unless it was killed."""
    peers: list[Peer] = []

    def make(*sizes_bytes: int) -> Peer:
        peers.append(Peer(rig, *sizes_bytes))
        return peers[-1]

    yield make
    killed = [peer.process.poll() is not None for peer in peers]
    codes = [peer.close() for peer in peers]
    assert all(was_killed or code == 0 for was_killed, code in zip(killed, codes, strict=True)), codes


@pytest.fixture
def make_memory() -> Iterator[Callable[..., SharedMemory]]:
    """Make memory of our own with this, random when a ``seed`` is given."""
    made: list[SharedMemory] = []

    def make(size_bytes: int, seed: int | None = None) -> SharedMemory:
        made.append(SharedMemory(size_bytes) if seed is None else SharedMemory.random(size_bytes, seed))
        return made[-1]

    yield make
    for memory in made:
        memory.remove()


@pytest.fixture
def make_sender(rig: Rig) -> Iterator[Callable[..., Backend]]:
    """Make started senders with this; they are closed at the end."""
    started: list[Backend] = []

    def make(*memories: SharedMemory) -> Backend:
        backend = rig.backend(f"us-{len(started)}")
        started.append(backend)
        backend.start(sends=True)
        for memory in memories:
            backend.register(memory.region)
        return backend

    yield make
    for backend in started:
        backend.close()
