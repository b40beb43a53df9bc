"""The class that vLLM loads. It ties vLLM's interface to the two halves, and decides nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from coordinator.errors import ConfigError
from coordinator.integrations.vllm.geometry import Cache, pool_of
from coordinator.integrations.vllm.ranks import RankHalf
from coordinator.integrations.vllm.scheduler import DecodeHalf, PrefillHalf
from coordinator.integrations.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from coordinator.client.pool import KVPool
    from coordinator.integrations.vllm.desk import Results
    from coordinator.integrations.vllm.orders import Order
    from coordinator.integrations.vllm.scheduler import SchedulerHalf

#: With which rank 0 alone may report; its module is only for who asks for it.
EXECUTOR: Final = "coordinator.integrations.vllm.executor.OneReporterExecutor"


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc] # vLLM is not there where this is checked
    """What the ranks are to do in a step.

    Attributes:
        orders: in this order.
        tokens: up to where they drain what has come from each coordinator, where rank 0 alone reports.

    """

    orders: list[Order] = field(default_factory=list)
    tokens: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Heads(KVConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """Up to where all live ranks have the events, for each coordinator; from rank 0."""

    tokens: dict[str, bytes]

    def aggregate(self, other: Heads) -> Heads:
        """Never called: one rank reports."""
        return other


class KVCoordinatorConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """vLLM's connector; see ``docs/vllm.md``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Be one of the halves; vLLM says which.

        Raises:
            ConfigError: the engine is set up in a way that this cannot serve.

        """
        super().__init__(vllm_config, role, kv_cache_config)
        _join_logs()
        self._sends = _sends(vllm_config.kv_transfer_config.kv_role)
        _check(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = ConnectorSettings.read(extra, sends=self._sends)
        self._parallel = vllm_config.parallel_config
        _check_executor(self._parallel, self._settings)
        self._cache = _cache(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._rank: RankHalf | None = None
        self._pool: KVPool | None = None
        self._leads = False
        self._spoilt: set[int] = set()
        # Of rank 0: as it has told them. Of the scheduler's half: as it has passed them on.
        self._told: dict[str, bytes] = {}
        self._heads: dict[str, bytes] = {}
        if role is KVConnectorRole.SCHEDULER:
            half = PrefillHalf if self._sends else DecodeHalf
            self._scheduler = half(self._settings, self._cache.block_tokens)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Say no: the KV cache would move, while others write into it."""
        del kv_transfer_config
        return False

    @property
    def one_reporter(self) -> bool:
        """Whether rank 0 alone tells what has ended; see ``executor``."""
        return self._settings.one_reporter

    # --- the scheduler's half ----------------------------------------------------------------

    @property
    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None  # noqa: S101 - vLLM calls these on the scheduler's half alone
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """Take a request that vLLM has queued."""
        self._planner.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tell how many tokens come from elsewhere, and that they come later."""
        count = self._planner.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that vLLM has for a request."""
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        """Return what the ranks are to do in this step."""
        del scheduler_output
        return Plan(self._planner.orders(), self._heads)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take the end of a request; tell whether its blocks are to be held, and what its client gets."""
        return self._planner.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished``; there is one group of blocks."""
        return self._planner.finished(request, block_ids[0])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what has ended on all ranks."""
        heads = connector_output.kv_connector_worker_meta
        if isinstance(heads, Heads):
            self._heads = heads.tokens
        self._planner.ended(connector_output.finished_sending or ())
        self._planner.ended(connector_output.finished_recving or ())

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping though it has nothing to compute."""
        return self._planner.busy

    # --- a rank's half -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the memory, and begin to talk to the coordinators."""
        rank = self._parallel.rank % self._cache.tp
        self._leads = rank == 0
        self._pool = pool_of(kv_caches, self._cache, rank)
        self._rank = RankHalf(self._settings, self._group, rank, sends=self._sends)
        self._rank.register(self._pool)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Do what the scheduler's half wants; returns at once."""
        del forward_context, kwargs
        plan = self._get_connector_metadata()
        if self._rank is not None:
            self._rank.follow(plan.tokens)
        self.carry_out(plan.orders)

    def carry_out(self, orders: Iterable[Order]) -> None:
        """Do what the scheduler's half wants."""
        if self._rank is not None:
            self._rank.take(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell vLLM which requests' blocks are quiet on this rank, and whose KV does not come."""
        del finished_req_ids
        results = self.news()
        if self._sends:
            return KVConnectorTransferResults(finished_sending=results.quiet)
        if self._leads and not self.one_reporter:
            self._spoilt = results.spoilt
        return KVConnectorTransferResults(finished_recving=results.quiet, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell vLLM the blocks of failed requests, where it keeps the failures themselves back.

        Where it gathers the outputs of ranks, it tells its scheduler of a failed request only when that
        one's blocks are quiet on all of them. Failed blocks it tells at once. All ranks hear the same
        verdict, so one of them tells it.
        """
        spoilt, self._spoilt = self._spoilt, set()
        return spoilt

    def news(self) -> Results:
        """Return what has ended on this rank."""
        assert self._rank is not None  # noqa: S101 - vLLM registers its memory before its first step
        return self._rank.results()

    def build_connector_worker_meta(self) -> Heads | None:
        """Tell the scheduler's half rank 0's tokens, where it alone reports and they are new."""
        if not self.one_reporter or not self._leads or self._rank is None:
            return None
        tokens = self._rank.tokens
        if tokens == self._told:
            return None
        self._told = tokens
        return Heads(tokens)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not computed before its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Do nothing: blocks are sent when all of a request is computed."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks that are sent are held."""

    def shutdown(self) -> None:
        """Leave the coordinators and give the memory back."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def _group(self) -> str:
        """Name this engine; each data-parallel one has its own."""
        name, parallel = self._settings.group, self._parallel
        return f"{name}-dp{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else name


def _join_logs() -> None:
    """Have what we log appear where vLLM's own log does: it configures nobody else's."""
    theirs = logging.getLogger("vllm")
    for name in ("backends", "coordinator"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False


def _sends(role: str) -> bool:
    """Whether this is a prefill engine.

    Raises:
        ConfigError: it is to be both, or neither.

    """
    if role not in {"kv_producer", "kv_consumer"}:
        message = f"kv_role: is {role!r}, must be 'kv_producer' (prefill) or 'kv_consumer' (decode)"
        raise ConfigError([message])
    return role == "kv_producer"


def _check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what cannot be served.

    Raises:
        ConfigError: naming everything that is wrong.

    """
    problems = []
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        problems.append(f"this model's KV cache has {len(groups)} groups of layers; one is supported")
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        problems.append(f"pipeline_parallel_size: is {stages}; pipeline stages are not supported")
    if problems:
        raise ConfigError(problems)


def _check_executor(parallel: ParallelConfig, settings: ConnectorSettings) -> None:
    """Refuse one reporting rank with an executor that listens to all.

    Raises:
        ConfigError: with what is to be set.

    """
    if not settings.one_reporter:
        return
    executor = parallel.distributed_executor_backend
    chosen = f"{executor.__module__}.{executor.__qualname__}" if isinstance(executor, type) else executor
    if chosen != EXECUTOR:
        message = (
            f"kv_connector_extra_config.one_reporter: is for --distributed-executor-backend {EXECUTOR}, "
            f"and not for {chosen}"
        )
        raise ConfigError([message])


def _cache(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Cache:
    """Read the KV cache's geometry."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    model = vllm_config.model_config
    return Cache(
        blocks=kv_cache_config.num_blocks,
        block_tokens=spec.block_size,
        kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        latent=bool(model.use_mla),
        tp=vllm_config.parallel_config.tensor_parallel_size,
    )
