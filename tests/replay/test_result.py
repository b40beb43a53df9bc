"""What a replay comes to, over time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from coordinator.replay.result import PARTS, Result
from coordinator.replay.samples import MIB, Sample, growth_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.sim.summary import Summary


def result(
    handoffs: Sequence[tuple[float, str | None, float]] = (), samples: Sequence[Sample] = ()
) -> Result:
    summary = cast("Summary", SimpleNamespace(seconds=PARTS / 10, as_json=dict))
    return Result(summary, 10.0, handoffs, samples, [], 0.0, 0, 0)


def sample(at_s: float, workers_mib: float) -> Sample:
    return Sample(at_s, 1, 0, {"coordinator": 40 * MIB, "workers": round(workers_mib * MIB)})


def test_handoffs_fall_into_the_part_in_which_they_began() -> None:
    first, second, *_, last = result(
        [
            (0.5, "", 0.010),
            (0.6, "", 0.030),
            (0.7, "peer_lost", 0.5),
            (1.5, "", -1.0),
            (PARTS + 5.0, "", 0.001),
        ]
    ).parts()
    assert (first.at_s, first.p50_ms, last.p99_ms) == pytest.approx((0.5, 20, 1))
    assert dict(first.outcomes) == {"": 2, "peer_lost": 1}
    assert (dict(second.outcomes), second.p50_ms, second.p99_ms) == ({"": 1}, None, None)
    assert dict(last.outcomes) == {"": 1}


def test_what_grows_during_the_warm_up_is_no_growth() -> None:
    samples = [sample(at_s, 10 + 50 * (at_s > 10)) for at_s in range(100)]
    assert growth_bytes(samples) == {"coordinator": 0, "workers": 0}
    assert result(samples=samples).is_flat


def test_what_goes_on_growing_is_not_flat() -> None:
    leaking = [sample(at_s, 10 + 0.5 * at_s) for at_s in range(100)]
    assert growth_bytes(leaking)["workers"] == pytest.approx(24.5 * MIB, abs=MIB)
    assert not result(samples=leaking).is_flat
