"""What two sides that took turns come to: a ratio, and how much it varies over the pairs of turns."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def ratio(pairs: Iterable[tuple[float, float]], name: str = "ratio") -> dict[str, float]:
    """Median and quartiles of first over second, of at least one pair of turns next to each other.

    Other work on the host changes the speed of both sides of a pair: so a ratio is that of a pair.
    """
    return spread([first / second for first, second in pairs], name)


def spread(values: Sequence[float], name: str) -> dict[str, float]:
    """Median and quartiles of at least one value, as ``name``, ``name_low`` and ``name_high``."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    )
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which ``percent`` (1 to 99) of 100 lie; there are at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
