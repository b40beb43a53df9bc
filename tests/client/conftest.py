"""What the client's tests share: a peer, pools and ranks that are closed at the end."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from coordinator.client import ClientSettings, KVPool, PrefillRank
from tests.client.peer import LAYOUT, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Connect(Protocol):
    """Connects a prefill rank to an address."""

    def __call__(
        self, address: str, rank: int = 0, world_size: int = 1, settings: ClientSettings | None = None
    ) -> PrefillRank:
        """Return a rank of the group ``prefill``, which is closed when the test ends."""
        ...


@pytest.fixture
def peer(short_dir: Path) -> Iterator[Peer]:
    with Peer(short_dir) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:
        pools: dict[int, KVPool] = {}

        def connect(
            address: str, rank: int = 0, world_size: int = 1, settings: ClientSettings | None = None
        ) -> PrefillRank:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(KVPool.allocate(LAYOUT, 64, world_size))
            return stack.enter_context(
                PrefillRank.connect(
                    address,
                    group="prefill",
                    rank=rank,
                    world_size=world_size,
                    pool=pools[world_size],
                    settings=settings or ClientSettings(),
                )
            )

        yield connect
