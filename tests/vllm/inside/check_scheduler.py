"""The scheduler's half in vLLM's own ``Scheduler``, which is stepped by hand: there is no model and no rank.

Runs in an environment with vLLM, of any version that the connector is for; ``test_scheduler`` has it run.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from coordinator.errors import ConfigError
from coordinator.integrations.vllm.connector import Heads
from coordinator.integrations.vllm.executor import OneReporterExecutor
from coordinator.integrations.vllm.orders import Cancel, Extend, Offer, Open, Send
from tests.vllm.rig import transfer

if TYPE_CHECKING:
    from coordinator.integrations.vllm.orders import Order

MODEL = os.environ["KV_COORDINATOR_MODEL"]
BLOCK = 32
BLOCKS = 40
#: One block is vLLM's own.
FREE = BLOCKS - 1
ADDRESS = "ipc:///run/kv-coordinator/control"
HERE = {"do_remote_decode": True, "transfer_id": "5"}
THERE = {"do_remote_prefill": True, "transfer_id": "5", "coordinator": ADDRESS}


class Stepper:
    """A real scheduler, whose steps' results the test makes up."""

    def __init__(
        self, role: str, policy: str = "fail", groups: int = 1, executor: str | None = None, **extra: Any
    ) -> None:
        configuration = transfer(role, "engine", ADDRESS, policy=policy, **extra)
        self.config = EngineArgs(
            model=MODEL, block_size=BLOCK, kv_transfer_config=configuration, enforce_eager=True,
            max_model_len=2048, max_num_batched_tokens=512, max_num_seqs=8, dtype="float32",
            distributed_executor_backend=executor,
        ).create_engine_config()  # fmt: skip
        self.config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{number}"], spec) for number in range(groups)],
        )  # fmt: skip
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config, kv_cache_config=cache, block_size=BLOCK, log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
        )  # fmt: skip
        self.orders: list[Order] = []
        self.tokens: dict[str, bytes] = {}
        self.answers: list[Any] = []

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self, name: str, tokens: int, params: dict[str, Any] | None, *, most: int = 1, refused: bool = False
    ) -> Request:
        """Have a request queued."""
        sampling = SamplingParams(max_tokens=most, extra_args={"kv_transfer_params": dict(params or {})})
        sampling.update_from_generation_config({}, 256)
        request = Request(
            request_id=name, prompt_token_ids=[index % 251 for index in range(tokens)],
            sampling_params=sampling, pooling_params=None, block_hasher=self.hasher,
        )  # fmt: skip
        request.abort_immediately = refused
        self.scheduler.add_request(request)
        return request

    def refuse(self, name: str, params: dict[str, Any]) -> None:
        """Tell of a request that the server has refused, as vLLM's engine does."""
        self.add(name, 1, params, refused=True)
        self.abort(name)

    def step(self, **told: Any) -> dict[str, int]:
        """Step once; ``told``: what the ranks have to tell. Returns how many tokens each request computed."""
        output = self.scheduler.schedule()
        self.orders += output.kv_connector_metadata.orders
        self.tokens = output.kv_connector_metadata.tokens
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        # A request that has computed its whole prompt gets a token.
        sampled = [[1] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=KVConnectorOutput(**told) if told else None,
        )  # fmt: skip
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.answers += outputs.outputs
        return dict(output.num_scheduled_tokens)

    def taken(self) -> list[Order]:
        """The orders since the last time."""
        orders, self.orders = self.orders, []
        return orders

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def end(self, name: str) -> str:
        """How a request has ended, as its client is told."""
        reasons = [answer.finish_reason for answer in self.answers if answer.request_id == name]
        assert reasons, f"{name} has not answered"
        return str(reasons[-1]).lower() if reasons[-1] is not None else ""


@pytest.fixture
def prefill() -> Stepper:
    return Stepper("kv_producer")


@pytest.fixture
def decode() -> Stepper:
    return Stepper("kv_consumer")


def waiting(decode: Stepper, tokens: int = 100, name: str = "d") -> Offer:
    """Have a request wait for its KV."""
    decode.add(name, tokens, THERE, most=4)
    assert decode.step() == {}
    (offer,) = decode.taken()
    assert isinstance(offer, Offer)
    return offer


# --- prefill -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_prefill_sends_all_blocks_and_holds_them(prefill: Stepper, tokens: int) -> None:
    request = prefill.add("p", tokens, HERE)
    while not request.is_finished():
        prefill.step()
    prefill.step()
    blocks = -(-tokens // BLOCK)
    opened, sent = prefill.taken()
    assert opened == Open("p", 5, ADDRESS)
    assert isinstance(sent, Send)
    assert len(sent.pages) == blocks
    told = {**THERE, "do_remote_decode": False, "prompt_tokens": tokens}
    assert told.items() <= prefill.answers[-1].kv_transfer_params.items()
    assert (prefill.free, prefill.scheduler.has_requests()) == (FREE - blocks, True)
    prefill.step(finished_sending={"p"})
    assert prefill.free == FREE
    prefill.step()
    assert not prefill.scheduler.has_requests()
    assert prefill.taken() == []


def test_prefill_is_told_once(prefill: Stepper) -> None:
    """The engine would die of the second time."""
    prefill.add("p", 50, HERE)
    prefill.step()
    prefill.step(finished_sending={"p"})
    with pytest.raises(AssertionError):
        prefill.step(finished_sending={"p"})


def test_prefill_is_aborted_after_it_has_ended(prefill: Stepper) -> None:
    """Nobody is told by vLLM: the blocks are held until they are quiet."""
    prefill.add("p", 50, HERE)
    prefill.step()
    prefill.abort("p")
    prefill.step()
    assert [type(order) for order in prefill.taken()] == [Open, Send]
    assert prefill.free == FREE - 2
    prefill.step(finished_sending={"p"})
    assert prefill.free == FREE


def test_prefill_is_aborted_in_the_middle(prefill: Stepper) -> None:
    prefill.add("p", 1000, HERE)
    prefill.step()
    prefill.abort("p")
    assert prefill.scheduler.has_requests(), "there is something to tell"
    prefill.step()
    opened, cancelled = prefill.taken()
    assert isinstance(opened, Open)
    assert isinstance(cancelled, Cancel)
    assert "FINISHED_ABORTED" in cancelled.why
    assert prefill.free == FREE


def test_prefill_is_aborted_while_it_is_queued(prefill: Stepper) -> None:
    prefill.add("p", 100, HERE)
    prefill.abort("p")
    prefill.step()
    assert [type(order) for order in prefill.taken()] == [Open, Cancel]
    assert prefill.free == FREE


def test_a_request_of_a_transfer_id_that_is_in_use_is_a_plain_one(prefill: Stepper) -> None:
    prefill.add("p", 50, HERE)
    prefill.add("q", 60, HERE)
    prefill.step()
    prefill.step()
    assert [order.request for order in prefill.taken()] == ["p", "p"]
    assert {answer.request_id: answer.kv_transfer_params for answer in prefill.answers}["q"] is None
    assert prefill.free == FREE - 2


def test_a_request_without_parameters_is_a_plain_one(prefill: Stepper) -> None:
    prefill.add("p", 50, None)
    prefill.step()
    prefill.step()
    assert (prefill.taken(), prefill.free) == ([], FREE)
    assert not prefill.scheduler.has_requests()


# --- decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_decode_computes_only_the_last_token(decode: Stepper, tokens: int) -> None:
    offer = waiting(decode, tokens)
    assert (len(offer.pages), offer.prefix_pages, offer.room) == (-(-tokens // BLOCK), 0, 5)
    decode.step(finished_recving={"d"})
    assert decode.step() == {"d": 1}
    while decode.scheduler.has_requests():
        decode.step()
    assert (decode.end("d"), decode.free, decode.taken()) == ("length", FREE, [])


def test_decode_offers_what_it_does_not_have(decode: Stepper) -> None:
    decode.add("before", 3 * BLOCK + 5, None)
    while decode.scheduler.has_requests():
        decode.step()
    offer = waiting(decode, 5 * BLOCK)
    assert (len(offer.pages), offer.prefix_pages) == (2, 3)


def test_decode_has_all_but_the_last_block(decode: Stepper) -> None:
    decode.add("before", 4 * BLOCK, None)
    while decode.scheduler.has_requests():
        decode.step()
    offer = waiting(decode, 4 * BLOCK)
    assert (len(offer.pages), offer.prefix_pages) == (1, 3)


def test_a_failure_is_told_at_once_and_blocks_are_held(decode: Stepper) -> None:
    waiting(decode)
    decode.step(failed_recving={"d"})
    assert decode.end("d") == "error"
    assert (decode.free, decode.scheduler.has_requests()) == (FREE - 4, True)
    decode.step()
    decode.taken()
    decode.step(finished_recving={"d"})
    assert decode.free == FREE
    decode.step()
    assert not decode.scheduler.has_requests()


def test_a_failure_and_its_release_in_one_step(decode: Stepper) -> None:
    """The end of the request is told before the failure: nothing is called off then."""
    waiting(decode)
    decode.step(failed_recving={"d"}, finished_recving={"d"})
    decode.step()
    assert (decode.end("d"), decode.free, decode.taken()) == ("error", FREE, [])
    assert not decode.scheduler.has_requests()


def test_after_a_failure_all_is_computed_here(decode: Stepper) -> None:
    decode = Stepper("kv_consumer", "recompute")
    waiting(decode)
    decode.step(failed_recving={"d"})
    assert decode.step() == {}, "not before the blocks are quiet"
    decode.step(finished_recving={"d"})
    assert decode.step() == {"d": 100}
    while decode.scheduler.has_requests():
        decode.step()
    assert (decode.end("d"), decode.free, decode.taken()) == ("length", FREE, [])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_several_ranks_tell_a_failure_at_once(policy: str) -> None:
    """Which request failed is kept back until its blocks are quiet everywhere; but not which blocks."""
    decode = Stepper("kv_consumer", policy)
    offer = waiting(decode)
    aggregator = KVOutputAggregator(2)

    def together(*outputs: dict[str, Any]) -> dict[str, Any]:
        results = [
            ModelRunnerOutput(
                req_ids=[], req_id_to_index={}, sampled_token_ids=[], logprobs=None, prompt_logprobs_dict={},
                pooler_output=[], kv_connector_output=KVConnectorOutput(**output),
            )
            for output in outputs
        ]  # fmt: skip
        output = aggregator.aggregate(results).kv_connector_output
        return {
            name: getattr(output, name)
            for name in ("finished_recving", "failed_recving", "invalid_block_ids")
        }

    failed = {"failed_recving": {"d"}}
    decode.step(**together(failed | {"invalid_block_ids": set(offer.pages)}, {}))
    assert (policy == "recompute") or decode.end("d") == "error"
    decode.step(**together({"finished_recving": {"d"}}, failed))
    assert decode.free == FREE - 4
    decode.step(**together({}, {"finished_recving": {"d"}}))
    if policy == "recompute":
        assert decode.step() == {"d": 100}
    else:
        assert decode.free == FREE


def test_decode_is_aborted_while_it_waits(decode: Stepper) -> None:
    waiting(decode)
    decode.abort("d")
    assert decode.scheduler.has_requests()
    decode.step()
    (cancelled,) = decode.taken()
    assert isinstance(cancelled, Cancel)
    assert decode.free == FREE - 4
    decode.step(failed_recving={"d"}, finished_recving={"d"})
    assert decode.free == FREE
    decode.step()
    assert not decode.scheduler.has_requests()


def test_decode_is_aborted_while_it_is_queued(decode: Stepper) -> None:
    """Prefill's blocks are to come back at once."""
    decode.add("d", 100, THERE)
    decode.abort("d")
    decode.step()
    assert [type(order) for order in decode.taken()] == [Cancel]
    assert decode.free == FREE


def test_decode_is_told_of_nobody_else(decode: Stepper) -> None:
    with pytest.raises(AssertionError):
        decode.step(finished_recving={"nobody"})


def test_decode_says_what_is_still_queued() -> None:
    decode = Stepper("kv_consumer", queued_s=1e-9)
    waiting(decode, 1000)
    decode.add("later", 1000, THERE | {"transfer_id": "6"})
    decode.step()
    decode.step()
    orders = [order for order in decode.taken() if order.request == "later"]
    assert orders
    assert {type(order) for order in orders} == {Extend}
    decode.step(finished_recving={"d"})
    while "d" in decode.scheduler.requests:
        decode.step()
    decode.step()
    assert isinstance([order for order in decode.taken() if order.request == "later"][-1], Offer)


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": None},
        {"coordinator": "tcp://10.0.0.1:7700"},
        {"do_remote_prefill": False},
    ],
)
def test_decode_computes_what_it_cannot_get(decode: Stepper, change: dict[str, Any]) -> None:
    decode.add("d", 100, THERE | change)
    assert decode.step() == {"d": 100}
    decode.step()
    assert (decode.taken(), decode.free) == ([], FREE)


def test_decode_calls_off_what_it_has_no_use_for(decode: Stepper) -> None:
    decode.add("d", 100, THERE | {"prompt_tokens": 99})
    assert decode.step() == {"d": 100}
    (cancelled,) = decode.taken()
    assert isinstance(cancelled, Cancel)
    assert "prefill had a prompt of 99 tokens, this one has 100" in cancelled.why


def test_decode_calls_off_what_its_server_has_refused(decode: Stepper) -> None:
    decode.refuse("d", THERE)
    decode.step()
    assert [type(order) for order in decode.taken()] == [Cancel]
    assert not decode.scheduler.requests


def test_a_failure_of_which_the_server_tells_too_is_not_called_off(decode: Stepper) -> None:
    waiting(decode)
    decode.step(failed_recving={"d"})
    decode.refuse("d-again", THERE)
    decode.step(finished_recving={"d"})
    decode.refuse("d-again", THERE)
    decode.step()
    assert [order for order in decode.taken() if order.request != "d"] == []
    assert decode.free == FREE


# --- one rank that reports for all ---------------------------------------------------------------------


def test_the_executor_gathers_nothing_and_only_with_one_reporter(prefill: Stepper) -> None:
    chosen = f"{OneReporterExecutor.__module__}.{OneReporterExecutor.__qualname__}"
    reporting = Stepper("kv_producer", executor=chosen, one_reporter=True).scheduler.connector
    executor: Any = SimpleNamespace(output_rank=0, kv_output_aggregator=...)
    OneReporterExecutor.init_kv_output_aggregator(executor, reporting)
    assert executor.kv_output_aggregator is None
    with pytest.raises(ConfigError, match="not KVCoordinatorConnector with one_reporter"):
        OneReporterExecutor.init_kv_output_aggregator(executor, prefill.scheduler.connector)
    executor.output_rank = 2
    with pytest.raises(ConfigError, match="vLLM listens to rank 2"):
        OneReporterExecutor.init_kv_output_aggregator(executor, reporting)


def test_rank_0s_tokens_ride_in_the_next_plan(decode: Stepper) -> None:
    waiting(decode)
    assert decode.tokens == {}
    decode.step(kv_connector_worker_meta=Heads({ADDRESS: b"token"}))
    decode.step()
    assert decode.tokens == {ADDRESS: b"token"}


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"role": "kv_both"}, "kv_role: is 'kv_both'"),
        ({"role": "kv_producer", "groups": 2}, "2 groups of layers"),
        ({"role": "kv_consumer", "no_such": 1}, "no_such: is not known"),
        (
            {"role": "kv_consumer", "one_reporter": True},
            "one_reporter: is for --distributed-executor-backend",
        ),
    ],
)
def test_what_cannot_be_served_is_told_at_the_start(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Stepper(**settings)
