"""The metrics: what is told is there, is true at every moment, and costs little."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.exposition import Exposition
from coordinator.metrics import TABLE, Counters, Histogram
from coordinator.reasons import Reason
from tests.http.served import in_every_state, served
from tests.service.chaos import Chaos
from tests.service.peers import LAYOUT
from tests.service.stage import VirtualStage, virtual_time
from tests.service.test_chaos import BOUNDS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def parsed(text: str) -> dict[str, Metric]:
    """The families of an exposition, by name."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(
        sample.value
        for sample in families[f"kv_coordinator_{name}"].samples
        if labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
    )


def balance(families: dict[str, Metric]) -> tuple[float, float]:
    """What was opened, and what became of it."""
    over = value(families, "handoffs_succeeded") + value(families, "handoffs_failed")
    return value(families, "handoffs_opened"), over + value(families, "handoffs_in_flight")


async def test_every_metric_of_the_table_is_told_with_its_kind_and_help() -> None:
    async with served() as it:
        families = parsed(await it.get("/metrics"))
        for metric in TABLE:
            family = families[f"kv_coordinator_{metric.name}"]
            assert (family.type, family.documentation) == (metric.kind, metric.help)
        # Their own registry: nothing of the library's default one is in it.
        assert "python_gc_objects_collected" not in families
        assert value_of_process(families) > 1 << 20


def value_of_process(families: dict[str, Metric]) -> float:
    """The resident memory, which the library reads."""
    (sample,) = families["process_resident_memory_bytes"].samples
    return sample.value


async def test_a_handoff_counts_once_whatever_the_number_of_its_ranks() -> None:
    """Case C51."""
    async with served() as it:
        await in_every_state(it.stage)
        families = parsed(await it.get("/metrics"))
        assert balance(families) == (5, 5)
        assert value(families, "handoffs_failed", reason="cancelled_by_prefill", backend="loopback") == 2
        assert {
            state: value(families, "handoffs_in_flight", state=state) for state in ("open", "waiting")
        } == {
            "open": 1,
            "waiting": 1,
        }
        page_bytes = LAYOUT.planes * LAYOUT.page_bytes(2)
        assert value(families, "quarantined_bytes") == 2 * page_bytes
        assert value(families, "broadcast_head", group="p") == 3
        assert value(families, "broadcast_lag_events", group="p") >= 0
        assert value(families, "ranks", group="d", state="ready") == 2
        assert value(families, "links", state="up") == 2
        assert value(families, "moves_in_flight") == 4
        assert value(families, "oldest_handoff_seconds") > 0
        assert value(families, "oldest_post_prefill_seconds") > 0


def test_verdicts_of_a_former_coordinator_are_counted_too() -> None:
    counters = Counters()
    for reason in (None, "deadline", None):
        counters.inherited(reason)
    assert (counters.succeeded, counters.failed) == (2, {"deadline": 1})


async def test_every_reason_is_told_before_it_happens() -> None:
    async with served() as it:
        families = parsed(await it.get("/metrics"))
        reasons = [s.labels["reason"] for s in families["kv_coordinator_handoffs_failed"].samples]
        assert reasons == [reason.value for reason in Reason]


def sums(text: bytes) -> dict[str, float]:
    """Each metric's sum over its labels; a tenth of the time that the library's parser takes."""
    found: dict[str, float] = {}
    for line in text.decode().splitlines():
        if line.startswith("kv_coordinator_"):
            series, _, number = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix("kv_coordinator_")
            found[name] = found.get(name, 0.0) + float(number)
    return found


@virtual_time
@pytest.mark.parametrize("seed", range(1))
async def test_the_counts_balance_at_every_scrape_of_a_chaos_run(seed: int) -> None:
    """Cases C51 and C52: the counts balance at every moment, and in the end every table is empty."""
    async with VirtualStage(BOUNDS) as stage:
        exposition = Exposition(stage.service.overview)
        before: dict[str, float] = {}
        scrapes = 0

        async def scrape() -> None:
            nonlocal scrapes
            while True:
                now = sums(exposition.text())
                in_flight = now["handoffs_in_flight"]
                over = now["handoffs_succeeded_total"] + now["handoffs_failed_total"]
                assert now["handoffs_opened_total"] == over + in_flight
                assert in_flight == len(stage.service.rooms.active)
                for name in now:
                    if name.endswith("_total"):
                        assert now[name] >= before.get(name, 0), f"{name} went back"
                before.update(now)
                scrapes += 1
                await asyncio.sleep(5.0)

        chaos = Chaos(stage, random.Random(seed))
        await chaos.start()
        scraping = asyncio.get_running_loop().create_task(scrape())
        await chaos.run()
        await stage.empty()
        scraping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scraping
        assert scrapes > 20
        assert before["handoffs_failed_total"] > 5
        families = parsed(exposition.text().decode())
        for name in ("handoffs_in_flight", "handoffs_unreleased", "quarantined_bytes", "moves_in_flight"):
            assert value(families, name) == 0
        assert stage.service.rooms.past_prefill == {}
        assert stage.service.rooms.moving == 0


def test_a_histogram_counts_what_is_at_most_a_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for duration_s in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(duration_s)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum_s) == (5, 104.0)


async def test_the_durations_of_a_handoff_are_counted() -> None:
    async with served() as it:
        prefill, decode, _ = await it.stage.pair()
        decode[0].offer(1, 1)
        prefill[0].send_pages(1, 2)
        assert (await prefill[0].outcome(1)).failure is None
        families = parsed(await it.get("/metrics"))
        for name in ("post_prefill_seconds", "transfer_seconds"):
            samples = {s.name: s.value for s in families[f"kv_coordinator_{name}"].samples}
            assert samples[f"kv_coordinator_{name}_count"] == 1
            assert 0 <= samples[f"kv_coordinator_{name}_sum"] < 10
        assert value(families, "moved_bytes") == it.stage.service.counters.bytes_moved > 0
