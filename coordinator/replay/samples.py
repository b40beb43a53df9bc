"""How much was on its way, and how much memory everybody had, look by look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB: Final = 1 << 20
#: Of a run, the first such part is not looked at for growth: everybody still warms up.
_WARM_PART: Final = 0.25
#: What is compared then: this part of the run after that, and the last one.
_COMPARED_PART: Final = 0.25


class Sample(NamedTuple):
    """One look.

    Attributes:
        at_s: when, in seconds of the trace.
        in_flight: handoffs that are not settled.
        waiting: prompts for which there is no engine yet.
        memory_bytes: private memory of all processes of a kind, by kind; pools are not private.

    """

    at_s: float
    in_flight: int
    waiting: int
    memory_bytes: Mapping[str, int]


def growth_bytes(samples: Sequence[Sample]) -> dict[str, int]:
    """How much more memory each kind has at the end of a run than after its warm-up, at the most in both."""
    if not samples:
        return {}
    begin_s, end_s = samples[0].at_s, samples[-1].at_s
    whole_s = end_s - begin_s
    warm_s = begin_s + _WARM_PART * whole_s
    first = [sample for sample in samples if warm_s <= sample.at_s <= warm_s + _COMPARED_PART * whole_s]
    last = [sample for sample in samples if sample.at_s >= end_s - _COMPARED_PART * whole_s]
    return {
        kind: max(sample.memory_bytes[kind] for sample in last)
        - max(sample.memory_bytes[kind] for sample in first or samples[:1])
        for kind in samples[-1].memory_bytes
    }
