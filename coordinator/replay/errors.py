"""What can be wrong with what a replay is asked for."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class ReplayError(CoordinatorError):
    """A trace, a script of faults or a size cannot be used; the text says where and why."""
