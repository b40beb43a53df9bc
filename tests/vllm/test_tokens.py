"""Two real engines, and one: the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.prompts import twenty
from tests.vllm.rig import Coordinator, Engine, Pair, transfer, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_a_single_engine(tp: int, python: str, model: Path, place: Path) -> None:
    prompts = twenty()
    with Engine(python, model, place, tp=tp) as single:
        single.ready()
        expected = [single.ask(prompt).tokens for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the answers depend on the prompts"
    coordinator = Coordinator(place)
    try:
        with (
            Engine(
                python, model, place, tp=tp, transfer=transfer("kv_producer", "prefill", coordinator.address)
            ) as one,
            Engine(
                python, model, place, tp=tp, transfer=transfer("kv_consumer", "decode", coordinator.address)
            ) as two,
        ):
            pair = Pair(one.ready(), two.ready())
            assert pair.ask_all(prompts, "a") == expected
            assert two.metric("vllm:external_prefix_cache_hits_total") > 0
            until(lambda: one.empty() and two.empty(), "all blocks are free")
    finally:
        coordinator.close()
