"""No byte lands in, or leaves from, a page that belongs to another room by now.

Real engines that cannot cancel: NIXL over TCP, and Mooncake. Two hundred handoffs, some of which are
given up, some run into their deadline, while the decode process is stopped and continued. Both sides
use their pages again the instant that these are released, and look at every word of every page.
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

BACKENDS = [
    pytest.param("nixl", {"transports": "tcp", "devices": "lo"}, marks=needs_nixl, id="nixl-tcp"),
    pytest.param("mooncake", {}, marks=needs_mooncake, id="mooncake"),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("backend", "backend_options"), BACKENDS)
def test_no_page_ever_holds_foreign_bytes(
    forks: ForkServer, backend: str, backend_options: dict[str, str]
) -> None:
    """Cases C17 and C23."""
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    with Corruption(options(backend, backend_options, None), forks, seed) as run:
        run.run(handoffs=200, stops=9)
        print(run.reasons, "fences:", run.fences())
        if run.book.disagreements:
            import shutil; shutil.copytree(run.cluster.directory, "/tmp/corr-fail", dirs_exist_ok=True, ignore=lambda d, n: [x for x in n if not x.endswith((".log", ".err"))])
        assert run.found() == []
        assert run.book.disagreements == []
        assert sum(handoff.corrupt_pages for handoff in run.book.settled) == 0
        assert run.reasons[""] > 100
        assert run.reasons["deadline"] and run.reasons["cancelled_by_prefill"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hasty", list(Role))
@pytest.mark.parametrize(("backend", "backend_options"), BACKENDS)
def test_pages_that_are_taken_back_with_the_outcome_get_foreign_bytes(
    forks: ForkServer, backend: str, backend_options: dict[str, str], hasty: Role
) -> None:
    """The proof that the test above can fail."""
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    with Corruption(options(backend, backend_options, hasty), forks, seed) as run:
        run.run(handoffs=30, stops=3)
        print(run.reasons, "fences:", run.fences())
        print("\n".join(run.found()))
        assert run.found()
