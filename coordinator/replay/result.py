"""What a replay comes to: figures, and how they went over time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from coordinator.replay.samples import growth_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.replay.samples import Sample
    from coordinator.replay.script import Fault
    from coordinator.sim.summary import Summary

#: Into so many parts of equal length a run is cut, to see how it went.
PARTS: Final = 40
#: Memory is flat when all processes together have grown by no more than this part, or by so much.
_FLAT_PART: Final = 0.05
_FLAT_BYTES: Final = 8 << 20


class Part(NamedTuple):
    """A part of a run, by when handoffs were begun.

    Attributes:
        at_s: the middle of it, in seconds of the trace.
        outcomes: how many handoffs of it had each outcome; empty for success.
        p50_ms: median from prefill-complete to success; None without one.
        p99_ms: 99th percentile of that.

    """

    at_s: float
    outcomes: Counter[str]
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run.

    Attributes:
        summary: as the demo's.
        speed: seconds of the trace in one of the clock.
        handoffs: of each that is settled: when it began, in seconds of the trace; its outcome, empty for
            success; seconds from prefill-complete to the outcome, on the clock, -1 where there are none.
        samples: what was in flight and in memory.
        faults: when each one happened, in seconds of the trace.
        behind_s: how late the router was at most with a prompt, on the clock.
        prompt_pages: of all requests.
        prefix_pages: of these, how many decode had already.

    """

    summary: Summary
    speed: float
    handoffs: Sequence[tuple[float, str | None, float]]
    samples: Sequence[Sample]
    faults: Sequence[tuple[float, Fault]]
    behind_s: float
    prompt_pages: int
    prefix_pages: int

    @property
    def end_s(self) -> float:
        """How long the run was, in seconds of the trace."""
        return self.summary.seconds * self.speed

    @property
    def most_in_flight(self) -> int:
        """How many handoffs were in flight at most, when somebody looked."""
        return max((sample.in_flight for sample in self.samples), default=0)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Private memory at the end, by kind of process."""
        return dict(self.samples[-1].memory_bytes) if self.samples else {}

    @property
    def growth_bytes(self) -> dict[str, int]:
        """How much memory has grown after the warm-up, by kind of process."""
        return growth_bytes(self.samples)

    @property
    def is_flat(self) -> bool:
        """Whether memory has not grown to speak of."""
        growth, whole = sum(self.growth_bytes.values()), sum(self.memory_bytes.values())
        return growth <= max(_FLAT_BYTES, _FLAT_PART * whole)

    def parts(self) -> list[Part]:
        """Cut the run into parts."""
        length_s = max(self.end_s, 1e-9) / PARTS
        cut: list[list[tuple[float, str | None, float]]] = [[] for _ in range(PARTS)]
        for handoff in self.handoffs:
            cut[min(PARTS - 1, int(handoff[0] / length_s))].append(handoff)
        return [_part((number + 0.5) * length_s, own) for number, own in enumerate(cut)]

    def as_json(self) -> dict[str, object]:
        """Return the figures under their stable names."""
        return self.summary.as_json() | {
            "speed": self.speed,
            "behind_s": round(self.behind_s, 4),
            "most_in_flight": self.most_in_flight,
            "prompt_pages": self.prompt_pages,
            "prefix_pages": self.prefix_pages,
            "memory_bytes": self.memory_bytes,
            "memory_growth_bytes": self.growth_bytes,
            "memory_flat": self.is_flat,
            "faults": [{"at_s": round(at_s, 1), "what": str(fault)} for at_s, fault in self.faults],
        }


def _part(at_s: float, handoffs: Sequence[tuple[float, str | None, float]]) -> Part:
    waits_ms = [1e3 * wait_s for _, outcome, wait_s in handoffs if outcome == "" and wait_s >= 0]
    p50_ms, p99_ms = np.percentile(waits_ms, (50, 99)).tolist() if waits_ms else (None, None)
    return Part(at_s, Counter(outcome or "" for _, outcome, _ in handoffs), p50_ms, p99_ms)
