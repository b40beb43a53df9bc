"""Two real engines, and one: the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.rig import Coordinator, Engine, Pair, transfer, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_a_single_engine(
    tp: int, python: str, model: Path, place: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Also the negative control: without the transfer they are not."""
    # Ranks of vLLM on CPU spin while they wait for one another: more of them than cores stand still.
    at_once = 4 // tp**2
    with (
        Coordinator(place) as coordinator,
        Engine(
            python, model, place, tp=tp, transfer=transfer("kv_producer", "p", coordinator.address)
        ) as prefill,
    ):
        to = coordinator.address
        with Engine(python, model, place, tp=tp, transfer=transfer("kv_consumer", "d", to)) as decode:
            pair = Pair(prefill.ready(), decode.ready())
            assert pair.ask_all(prompts, "first", at_once) == expected
            came = decode.metric("vllm:external_prefix_cache_hits_total")
            assert came > sum(map(len, prompts)) / 2
            # The last four share a prefix, which decode has in its cache.
            assert decode.metric("vllm:prefix_cache_hits_total") > 0
            assert pair.ask_all(prompts, "again", at_once) == expected
            again = decode.metric("vllm:external_prefix_cache_hits_total") - came
            assert 0 < again < came / 2, "what decode has in its cache does not travel"
            until(lambda: prefill.empty() and decode.empty(), "all blocks are free")
        status = coordinator.get("/v1/status")
        assert (status["succeeded"], status["failed"]) == (2 * len(prompts), {})
        configuration = transfer("kv_consumer", "d", to, module="tests.vllm.suppressed", name="Suppressed")
        with Engine(python, model, place, tp=tp, transfer=configuration) as broken:
            answers = Pair(prefill, broken.ready()).ask_all(prompts, "broken", at_once)
        # A prompt of one token has no KV but that of the token which decode computes itself.
        wrong = [answer != tokens for answer, tokens in zip(answers, expected, strict=True)]
        assert wrong == [len(prompt) > 1 for prompt in prompts]
        until(prefill.empty, "all blocks are free")
