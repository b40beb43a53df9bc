"""Engines of different numbers of ranks; and one rank that reports for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.prompts import prompt
from tests.vllm.rig import Coordinator, Engine, Pair, transfer, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

#: One name, written out: its module needs vLLM.
EXECUTOR = "coordinator.integrations.vllm.executor.OneReporterExecutor"


def test_one_rank_hands_over_to_two_of_which_one_reports(
    python: str, model: Path, place: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Coordinator(place, deadline_s=20.0) as coordinator:
        to = coordinator.address
        alone = transfer("kv_consumer", "decode", to, one_reporter=True)
        with (
            Engine(python, model, place, transfer=transfer("kv_producer", "prefill", to)) as prefill,
            Engine(
                python, model, place, tp=2, transfer=alone,
                arguments=("--distributed-executor-backend", EXECUTOR),
            ) as decode,
        ):  # fmt: skip
            pair = Pair(prefill.ready(), decode.ready())
            assert pair.ask_all(prompts, "first", 1) == expected
            assert coordinator.get("/v1/status")["succeeded"] == len(prompts)
            # A failure: prefill's blocks wait for decode in vain. What comes too late is told so (case C25).
            given = prefill.ask(
                prompt(1, 500), 1, kv_transfer_params={"do_remote_decode": True, "transfer_id": "late"}
            ).params
            until(prefill.empty, "prefill's blocks come back at the deadline")
            assert decode.ask(prompt(1, 500), kv_transfer_params=given).status == 500
            until(lambda: prefill.empty() and decode.empty(), "all blocks are free")
