"""The real processes of a bench or a test: what is left of them when something fails."""

from __future__ import annotations

import pytest

from coordinator.sim.errors import SimulationError
from scripts.benches.support.deployment import Deployment


def test_what_fails_shows_the_coordinator_s_last_lines() -> None:
    """They go with everything else of the deployment."""

    def fail() -> None:
        with Deployment("scripts.benches.deadline", {}) as deployment:
            deployment.wait_for_log("coordinator.ready", 1)
            message = "the ranks disagree"
            raise SimulationError(message)

    with pytest.raises(SimulationError, match="the ranks disagree") as failed:
        fail()
    (note,) = failed.value.__notes__
    assert note.startswith("the coordinator's last lines:\n")
    assert '"event":"coordinator.ready"' in note
