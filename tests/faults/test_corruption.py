"""No byte lands in, or leaves from, a page that belongs to another room by now.

Real engines that cannot cancel: NIXL over TCP, and Mooncake. Two hundred handoffs, some of which are
given up, some run into their deadline, while the decode process is stopped and continued; at the end
the coordinator and the decode process are killed and started again. Both sides use their pages again
the instant that these are released, and look at every byte of every page.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from coordinator.messages import Role
from tests.backends.rigs import needs_mooncake, needs_nixl
from tests.faults.corruption.drive import Corruption, options

if TYPE_CHECKING:
    from coordinator.sim.forks import ForkServer

pytestmark = pytest.mark.timeout(180)

HANDOFFS = 200
STOPS = 8

over_both = pytest.mark.parametrize(
    ("backend", "its_options"),
    [
        # On shared memory a write is a copy that is over at once.
        pytest.param("nixl", {"transports": "tcp", "devices": "lo"}, marks=needs_nixl, id="nixl-tcp"),
        pytest.param("mooncake", {}, marks=needs_mooncake, id="mooncake"),
    ],
)


@pytest.fixture
def seed() -> int:
    """Another one each time; a test that fails shows it."""
    value = time.time_ns() % 1_000_000
    print("seed", value)  # noqa: T201 - pytest shows it when the test fails
    return value


@over_both
def test_no_page_ever_holds_foreign_bytes(
    forks: ForkServer, backend: str, its_options: dict[str, str], seed: int
) -> None:
    """Cases C17 and C23."""
    with Corruption(options(backend, its_options), forks, seed) as run:
        run.start()
        run.hold_up()
        run.storm(HANDOFFS, STOPS)
        run.hold_up(until_fenced=True)
        run.replace_coordinator()
        run.storm(HANDOFFS // 10, 1)
        run.replace_decode()
        run.storm(HANDOFFS // 10, 1)
        run.finish()
        assert run.found() == []
        assert run.book.disagreements == []
        assert run.book.refusals == []
        assert sum(handoff.corrupt_pages for handoff in run.book.settled) == 0
        # And all that there is to go wrong has happened.
        assert run.reasons[""] > HANDOFFS // 3
        assert run.fences()
        for reason in ("deadline", "cancelled_by_prefill", "cancelled_by_decode"):
            assert run.reasons[reason], reason


@pytest.mark.parametrize("hasty", list(Role))
@over_both
def test_pages_that_are_taken_back_with_the_outcome_get_foreign_bytes(
    forks: ForkServer, backend: str, its_options: dict[str, str], hasty: Role, seed: int
) -> None:
    """The proof that the test above can fail, for either side."""
    with Corruption(options(backend, its_options, hasty), forks, seed) as run:
        run.start()
        # Late bytes need not land each time: whatever is busy here may hold them up until the fence.
        for _ in range(12):
            run.hold_up()
            if run.found():
                break
        run.finish()
        assert run.reasons["deadline"]
        assert run.found()
