"""Many requests at once: each is retired by all ranks in the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.sglang.rig import Coordinator, Engine, outcome, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sglang.rig import Host

pytestmark = pytest.mark.timeout(180)

#: The first room of each batch.
BATCHES: Final = (1000, 2000, 3000)


def test_many_that_end_one_after_the_other_are_retired_by_all_ranks_in_the_same_steps(
    host: Host, place: Path
) -> None:
    """Their verdicts reach each rank at a time of its own."""
    coordinator = Coordinator(place, deadline_s=120.0)
    steps = set()
    try:
        with Engine(host, place, 2, coordinator.address) as engine:
            until(engine.is_on, "the coordinator decides")
            for first in BATCHES:
                rooms = range(first, first + 200)
                engine.say(f"prefill {' '.join(map(str, rooms))}")
                engine.in_flight(*rooms)
                engine.ask(0, "done", *rooms)
                for start in range(0, len(rooms), 10):
                    engine.ask(1, "done", *rooms[start : start + 10])
                reports = engine.done(*rooms)
                ends = [outcome(reports, room) for room in rooms]
                assert {end.kind for end in ends} == {"succeeded"}
                steps |= {end.step for end in ends}
    finally:
        coordinator.close()
    # Else each batch was retired in one step, and this shows nothing. More depends on the host's speed.
    assert len(steps) > len(BATCHES)
