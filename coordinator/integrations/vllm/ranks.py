"""A rank's half: its clients, and what vLLM is told of their events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.client.endpoint import Endpoint
from coordinator.client.rank import DecodeRank, PrefillRank
from coordinator.integrations.vllm.desk import Desk, Results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from coordinator.client.pool import KVPool
    from coordinator.integrations.vllm.orders import Order
    from coordinator.integrations.vllm.settings import ConnectorSettings

logger = logging.getLogger(__name__)


class RankHalf:
    """One rank of an engine. All calls come from the engine's thread."""

    def __init__(self, settings: ConnectorSettings, group: str, rank: int, *, sends: bool) -> None:
        """Have no memory yet; ``sends``: of a prefill engine."""
        self._settings = settings
        self._group = group
        self._rank = rank
        self._sends = sends
        self._endpoint: Endpoint | None = None
        self._desks: dict[str, Desk] = {}

    def register(self, pool: KVPool) -> None:
        """Begin to talk to the coordinators, about the blocks of this pool.

        Raises:
            BackendError: decode's backend cannot be had or started, or refuses the memory.
            CoordinatorError: an address, a name or a key cannot be used.

        """
        settings, group, rank = self._settings, self._group, self._rank
        size = pool.world_size
        if not self._sends:
            self._endpoint = Endpoint(pool, settings.backend, settings.backend_options)
        for address in settings.coordinators:
            client: PrefillRank | DecodeRank
            if self._endpoint is None:
                client = PrefillRank.connect(
                    address, group=group, rank=rank, world_size=size, pool=pool, settings=settings.client
                )
            else:
                client = DecodeRank.connect(
                    address, group=group, rank=rank, world_size=size, endpoint=self._endpoint,
                    settings=settings.client,
                )  # fmt: skip
            self._desks[address] = Desk(client, address, by_token=settings.one_reporter)
        logger.info(
            "%s/%d: %d blocks in %d tensors, %s; coordinators: %s",
            group, rank, pool.pages, len(pool.regions), pool.layout, ", ".join(settings.coordinators),
        )  # fmt: skip

    @property
    def tokens(self) -> dict[str, bytes]:
        """Up to where all live ranks have the events, for each coordinator."""
        return {address: desk.head for address, desk in self._desks.items()}

    def follow(self, tokens: Mapping[str, bytes]) -> None:
        """Take what has arrived up to rank 0's tokens, where it alone reports.

        Raises:
            NotReadyError: this rank lacks what rank 0 has; it cannot go on with the others.

        """
        for address, token in tokens.items():
            self._desks[address].follow(token)

    def take(self, orders: Iterable[Order]) -> None:
        """Do what the scheduler's half wants."""
        for order in orders:
            self._desks[order.coordinator].take(order)

    def results(self) -> Results:
        """Return what is new."""
        results = Results()
        for desk in self._desks.values():
            results.add(desk.results())
        return results

    def close(self) -> None:
        """Leave the coordinators and give the memory back."""
        for desk in self._desks.values():
            desk.close()
        self._desks.clear()
        if self._endpoint is not None:
            self._endpoint.close()
