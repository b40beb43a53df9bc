"""What is counted: plain numbers where things happen, and the table that Prometheus is given of them.

A handoff counts once, not once per rank. The numbers are plain ints, for they are counted on the hot
path; ``TABLE`` says which metric each of them is, and they are collected when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from coordinator import logs
from coordinator.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from coordinator.handoff import Handoff
    from coordinator.overview import Overview

#: Upper bounds, seconds. Waits reach from a local copy to a deadline of half an hour.
WAIT_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1800.0,
)  # fmt: skip
#: The same for how late the event loop is.
LAG_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Histogram:
    """How often a duration fell between two bounds.

    Attributes:
        bounds_s: the upper bound of each bucket but the last, which has none.
        counts: of each bucket, one more than there are bounds.
        sum_s: of all durations.

    """

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Start empty; ``bounds_s`` rise."""
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, and how many durations were at most that."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self.bounds_s), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class Counters:
    """The coordinator's counters since its start.

    ``opened == succeeded + sum(failed.values()) + in flight`` holds at every moment.

    Attributes:
        post_prefill_s: from prefill-complete to the verdict.
        transfer_s: from the moment when only bytes are missing to success.
        release_s: from the verdict of a failed handoff until its pages are quiet.
        loop_lag_s: how late the event loop is.

    """

    __slots__ = (
        "bugs",
        "bytes_moved",
        "connect_failures",
        "connects",
        "failed",
        "late",
        "loop_lag_s",
        "malformed",
        "opened",
        "post_prefill_s",
        "ranks_lost",
        "ranks_returned",
        "reconnects",
        "refused",
        "release_s",
        "replayed_events",
        "replays",
        "succeeded",
        "transfer_s",
        "worker_deaths",
    )

    def __init__(self) -> None:
        """All zero."""
        self.opened = 0
        self.succeeded = 0
        self.failed: Counter[str] = Counter()
        self.bytes_moved = 0
        self.late: Counter[str] = Counter()
        self.malformed = 0
        self.refused: Counter[str] = Counter()
        self.ranks_lost = 0
        self.ranks_returned = 0
        self.replays = 0
        self.replayed_events = 0
        self.connects = 0
        self.reconnects = 0
        self.connect_failures = 0
        self.worker_deaths = 0
        self.bugs = 0
        self.post_prefill_s = Histogram(WAIT_BOUNDS_S)
        self.transfer_s = Histogram(WAIT_BOUNDS_S)
        self.release_s = Histogram(WAIT_BOUNDS_S)
        self.loop_lag_s = Histogram(LAG_BOUNDS_S)

    def concluded(self, handoff: Handoff) -> None:
        """Count the verdict of a handoff, and how long it took."""
        failure = handoff.machine.failure
        if failure is not None:
            self.failed[failure.reason] += 1
        else:
            self.succeeded += 1
            if handoff.moving_at_s:
                self.transfer_s.observe(handoff.concluded_at_s - handoff.moving_at_s)
        if handoff.complete_at_s:
            self.post_prefill_s.observe(handoff.concluded_at_s - handoff.complete_at_s)
        self.bytes_moved += handoff.moved_bytes

    def inherited(self, reason: str | None) -> None:
        """Count the verdict of a handoff that had ended before this coordinator began."""
        if reason is None:
            self.succeeded += 1
        else:
            self.failed[reason] += 1


#: One value without labels, one for each combination of label values, or a histogram.
Values = float | dict[tuple[str, ...], float] | Histogram


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without the prefix of all.
        kind: a counter's name has no ``_total`` here, and has it in the exposition.
        help: one sentence.
        labels: their names.
        read: where the values are.

    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[Overview], Values]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in the exposition, without what is added for a histogram's parts."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


PREFIX: Final = "kv_coordinator_"


def _failed(overview: Overview) -> Values:
    # Every reason from the start: a rate over a series that appears with its first failure misses that one.
    failed, backend = overview.counters.failed, overview.config.backend.name
    return {(reason.value, backend): failed[reason] for reason in Reason}


def _by_kind(counts: Counter[str]) -> Values:
    return {(kind,): count for kind, count in counts.items()}


def _of_groups(read: Callable[[Overview], Iterable[tuple[str, float]]]) -> Callable[[Overview], Values]:
    return lambda overview: {(name,): value for name, value in read(overview)}


#: Every metric of the coordinator.
TABLE: Final = (
    Metric("info", "gauge", "Always 1; the version, name and backend of this coordinator.",
           lambda o: {(o.version, o.config.service.name, o.config.backend.name): 1.0},
           ("version", "name", "backend")),
    Metric("uptime_seconds", "gauge", "Since the start.", lambda o: o.uptime_s),
    Metric("ready", "gauge", "1 when ready, as /readyz says.", lambda o: float(not o.troubles())),
    Metric("draining", "gauge", "1 when no new handoffs are admitted.", lambda o: float(o.rooms.draining)),
    Metric("handoffs_opened", "counter", "Handoffs that have begun.", lambda o: o.counters.opened),
    Metric("handoffs_succeeded", "counter", "Handoffs that have succeeded.", lambda o: o.counters.succeeded),
    Metric("handoffs_failed", "counter", "Handoffs that have failed.", _failed, ("reason", "backend")),
    Metric("handoffs_in_flight", "gauge", "Handoffs without a verdict.",
           lambda o: {(state,): count for state, count in o.in_flight().items()}, ("state",)),
    Metric("handoffs_unreleased", "gauge", "Handoffs with a verdict whose pages are not all quiet.",
           lambda o: len(o.rooms.unreleased)),
    Metric("oldest_handoff_seconds", "gauge", "Age of the oldest handoff without a verdict; 0 without one.",
           lambda o: o.oldest_s(o.now_s()) or 0.0),
    Metric("oldest_post_prefill_seconds", "gauge",
           "How long the handoff that waits longest since prefill-complete has waited; 0 without one.",
           lambda o: o.oldest_past_prefill_s(o.now_s()) or 0.0),
    Metric("post_prefill_seconds", "histogram", "From prefill-complete to the verdict.",
           lambda o: o.counters.post_prefill_s),
    Metric("transfer_seconds", "histogram", "From the moment when only bytes were missing to success.",
           lambda o: o.counters.transfer_s),
    Metric("release_seconds", "histogram", "From a failure until all pages of the handoff were quiet.",
           lambda o: o.counters.release_s),
    Metric("moved_bytes", "counter", "Bytes of handoffs with a verdict that have arrived.",
           lambda o: o.counters.bytes_moved),
    Metric("quarantined_bytes", "gauge", "Bytes that failed handoffs hold, for they are not quiet.",
           lambda o: o.quarantine.held_bytes),
    Metric("quarantine_budget_bytes", "gauge", "How many may be held before the coordinator is not ready.",
           lambda o: o.quarantine_budget()),
    Metric("quarantined_handoffs", "gauge", "Failed handoffs that hold them.", lambda o: len(o.quarantine)),
    Metric("late_events", "counter", "What came after the verdict, and changed nothing.",
           lambda o: _by_kind(o.counters.late), ("kind",)),
    Metric("refused", "counter", "What ranks said that was refused.",
           lambda o: _by_kind(o.counters.refused), ("kind",)),
    Metric("malformed_messages", "counter", "Frames that are no message of the protocol.",
           lambda o: o.counters.malformed),
    Metric("ranks", "gauge", "Ranks that a group has, by whether they are there.",
           lambda o: o.ranks(), ("group", "role", "state")),
    Metric("ranks_lost", "counter", "Ranks that died, left or were silent for too long.",
           lambda o: o.counters.ranks_lost),
    Metric("ranks_returned", "counter", "Lost ranks that came back.", lambda o: o.counters.ranks_returned),
    Metric("broadcast_head", "gauge", "Number of a group's newest event.",
           _of_groups(lambda o: ((g.name, g.log.head) for g in o.groups)), ("group",)),
    Metric("broadcast_lag_events", "gauge", "How many events the slowest live rank has not acknowledged.",
           _of_groups(lambda o: ((g.name, o.lag(g)) for g in o.groups)), ("group",)),
    Metric("broadcast_kept_events", "gauge", "Events kept for ranks that may still need them.",
           _of_groups(lambda o: ((g.name, len(g.log)) for g in o.groups)), ("group",)),
    Metric("replays", "counter", "How often a rank fetched events that it had missed.",
           lambda o: o.counters.replays),
    Metric("replayed_events", "counter", "Events that ranks fetched.", lambda o: o.counters.replayed_events),
    Metric("links", "gauge", "Links from workers to decode ranks.",
           lambda o: {(state,): count for state, count in o.links().items()}, ("state",)),
    Metric("connects", "counter", "Links that were opened.", lambda o: o.counters.connects),
    Metric("reconnects", "counter", "Links that were opened again.", lambda o: o.counters.reconnects),
    Metric("connect_failures", "counter", "Links that could not be opened.",
           lambda o: o.counters.connect_failures),
    Metric("workers", "gauge", "Workers.", lambda o: {(s,): n for s, n in o.workers().items()}, ("state",)),
    Metric("worker_restarts", "counter", "Workers that died; each is started again unless that is hopeless.",
           lambda o: o.counters.worker_deaths),
    Metric("moves_in_flight", "gauge", "Moves that workers have.", lambda o: len(o.transfers.flights)),
    Metric("loop_lag_seconds", "histogram", "How late the event loop is, looked at four times a second.",
           lambda o: o.counters.loop_lag_s),
    Metric("bugs", "counter", "Errors in the coordinator itself; each is in the log.",
           lambda o: o.counters.bugs),
    Metric("log_lines_dropped", "counter", "Lines of the log that could not be written.",
           lambda _: logs.dropped()),
)  # fmt: skip
