"""The negative control: a decode engine whose connector claims that KV has come, and has none.

It fills the blocks with noise first: there might be the right KV in them from before. Runs in vLLM's
environment, which loads it in the place of the connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coordinator.integrations.vllm.connector import KVCoordinatorConnector
from coordinator.integrations.vllm.orders import Cancel, Offer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coordinator.integrations.vllm.desk import Results
    from coordinator.integrations.vllm.orders import Order


class Suppressed(KVCoordinatorConnector):
    """Offers nothing."""

    def carry_out(self, orders: Iterable[Order]) -> None:
        """Call each handoff off, and note that it has succeeded."""
        claimed = self.__dict__.setdefault("claimed", set())
        for order in orders:
            if isinstance(order, Offer):
                assert self._pool is not None
                for plane in self._pool.tensors:
                    block = plane[:, order.pages]
                    noise = torch.randn(block.numel() // 4, dtype=torch.float32)
                    plane[:, order.pages] = noise.view(torch.uint8).view(block.shape)
                claimed.add(order.request)
                super().carry_out([Cancel(order.request, order.room, order.coordinator, "suppressed")])
            elif not isinstance(order, Cancel):
                super().carry_out([order])

    def news(self) -> Results:
        """Claim."""
        results = super().news()
        claimed = self.__dict__.setdefault("claimed", set())
        results.quiet |= claimed
        claimed.clear()
        return results
