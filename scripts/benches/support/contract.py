"""What a bench gets, and how it says what counts as good."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        quick: a few seconds instead of as long as good figures need.

    """

    quick: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of one metric: at most, or at least, ``limit``."""

    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value >= self.limit if self.at_least else value <= self.limit
