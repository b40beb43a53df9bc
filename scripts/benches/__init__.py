"""The measurements of ``scripts/bench``: one module for each bench, found by its name.

A bench is a module here with

- a docstring whose first line says what is measured,
- ``TARGETS: dict[str, Target]``: the target of each metric that has one,
- ``run(arguments: Arguments) -> Metrics``, a function or a coroutine (which runs on uvloop).

What has no ``run`` is a helper.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A figure for each metric; a bench that compares several things has one such table for each.
Metrics = dict[str, "float | dict[str, float]"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the command line says.

    Attributes:
        quick: measure less, to see that it works; the figures mean little.

    """

    quick: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What a metric should reach on two cores that others share.

    Attributes:
        limit: the bound.
        at_least: the metric should be at least the limit; otherwise at most.

    """

    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g}"


def at_most(limit: float) -> Target:
    """Return a target for a metric that should be small."""
    return Target(limit)


def at_least(limit: float) -> Target:
    """Return a target for a metric that should be large."""
    return Target(limit, at_least=True)
