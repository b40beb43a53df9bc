"""Fixtures of the tests of layouts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from backends import nixl_engine, registry
from backends.base import Status
from tests.backends.memory import SharedMemory
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from backends.base import Link, Part

#: Bytes of the largest pool here.
POOL_BYTES = 1 << 17


class Rank:
    """The memory of one rank, registered with a backend of its own."""

    def __init__(self, backend: str, name: str, *, sends: bool) -> None:
        self.memory = SharedMemory(POOL_BYTES)
        self.backend = registry.load(backend)(name, {})
        self.backend.start(sends=sends)
        self.backend.register(self.memory.region)

    def put(self, content: NDArray[np.uint8]) -> None:
        """Fill the pool, and mark what lies behind it."""
        self.memory.bytes[:] = 0xAB
        self.memory.bytes[: content.size] = content

    def close(self) -> None:
        self.backend.close()
        self.memory.remove()


class Fabric:
    """The ranks of both sides, and links between them; they are made when they are first used."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.sources: dict[int, Rank] = {}
        self.targets: dict[int, Rank] = {}
        self._links: dict[tuple[int, int], Link] = {}

    def put(self, prefill: Sequence[NDArray[np.uint8]], decode: Sequence[NDArray[np.uint8]]) -> None:
        """Fill the pools of all ranks of two engines."""
        for ranks, contents in ((self.sources, prefill), (self.targets, decode)):
            for number, content in enumerate(contents):
                if number not in ranks:
                    name = "prefill" if ranks is self.sources else "decode"
                    ranks[number] = Rank(self._backend, f"{name}/{number}", sends=ranks is self.sources)
                ranks[number].put(content)

    def write(self, source: int, target: int, posts: Iterable[list[Part]]) -> None:
        """Write posts from one rank to another, as a lane does."""
        if (source, target) not in self._links:
            endpoint = self.targets[target].backend.endpoint()
            self._links[source, target] = self.sources[source].backend.connect(f"decode/{target}", endpoint)
        for post in posts:
            transfer = self._links[source, target].write(post)
            eventually(lambda: transfer.poll() is not Status.MOVING, what="the write is over")  # noqa: B023 - at once
            assert transfer.status is Status.DONE

    def close(self) -> None:
        for rank in (*self.sources.values(), *self.targets.values()):
            rank.close()


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    made = Fabric("loopback")
    yield made
    made.close()


@pytest.fixture(scope="module")
def nixl_fabric() -> Iterator[Fabric]:
    """The same over NIXL. What that does to the environment of this process is undone."""
    before = dict(os.environ)
    made = Fabric("nixl")
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)
    nixl_engine._environment = None
