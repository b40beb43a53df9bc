"""An executor that asks one rank alone what has ended, instead of all of them in each step.

With any connector, vLLM gathers the outputs of all ranks in each step, to count whose transfers have ended
everywhere. The coordinator's verdicts and releases are those of a whole group. So rank 0 can speak for
all, under one condition: that no rank is behind what rank 0 acts on. It holds like this. Rank 0 tells the
scheduler's half its head token, up to which all live ranks have the events. The token rides in the next
step's plan, and every rank drains up to it, no more and no less, before it does what that step says. A rank
that does not reach it raises, and vLLM ends the engine. What a later step does to blocks that are freed on
the word of rank 0 comes after that on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class OneReporterExecutor(MultiprocExecutor):  # type: ignore[misc] # vLLM is not there where this is checked
    """vLLM's own executor of several processes, without the gathering."""

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        """Gather nothing.

        Raises:
            ConfigError: the connector does not have one rank report, or vLLM listens to another rank.

        """
        if not getattr(connector, "one_reporter", False):
            message = "the connector is not KVCoordinatorConnector with one_reporter; use vLLM's own executor"
            raise ConfigError([message])
        if self.output_rank != 0:
            message = f"vLLM listens to rank {self.output_rank}, and rank 0 is the one that reports"
            raise ConfigError([message])
        self.kv_output_aggregator = None
