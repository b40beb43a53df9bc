"""The errors of the simulated engines."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class SimulationError(CoordinatorError):
    """A simulated process or the run as a whole went wrong; the text says which and how."""


class AllocationError(SimulationError):
    """A page allocator was used wrongly: an owner that holds pages already, or holds none."""


class LockstepError(SimulationError):
    """A step did not arrive, came in the wrong order, or could not be passed on."""
