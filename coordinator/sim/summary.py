"""What a run comes to: the figures, whether all is well, and why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from coordinator.layout import Layout
    from coordinator.sim.book import Book, Handoff


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run.

    Attributes:
        backend: name of the transfer backend.
        handoffs: how many were begun.
        succeeded: how many of them succeeded.
        failed: how many failed, by reason.
        unresolved: how many have no outcome, or no release, on some rank.
        corrupt_pages: pages that did not hold what they must after a success, over all decode ranks.
        bytes_moved: by handoffs that succeeded, over all decode ranks.
        seconds: from the first request to the last release, the restart included.
        p50_ms: from prefill-complete to success, as the slowest prefill rank saw it; None for none.
        p99_ms: the same.
        heal_s: from the kill to the first success on the new incarnation, whose start is included;
            None when nothing was killed, or nothing has succeeded since.
        ranks_agree: whether all ranks of each group did the same in every step, and all ranks of
            both groups have the same outcome for each handoff.
        failed_everywhere_s: from the kill until every prefill rank had applied the failure of the
            last handoff that was in flight to the killed incarnation; None when nothing was killed.
        restart_s: from the kill until all ranks of the new incarnation were ready.
        recover_s: from the kill of the coordinator to the first success after it, the start of the
            new one included; None when it was not killed, or nothing has succeeded since.
        problems: a sentence for everything that must not be.
        examples: for each reason, one of its sentences.

    """

    backend: str
    handoffs: int
    succeeded: int
    failed: dict[str, int]
    unresolved: int
    corrupt_pages: int
    bytes_moved: int
    seconds: float
    p50_ms: float | None
    p99_ms: float | None
    heal_s: float | None
    ranks_agree: bool
    failed_everywhere_s: float | None = None
    restart_s: float | None = None
    recover_s: float | None = None
    problems: tuple[str, ...] = ()
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all is well. Failed handoffs are no problem: they failed in good order."""
        return not (self.problems or self.unresolved or self.corrupt_pages) and self.ranks_agree

    def as_json(self) -> dict[str, object]:
        """Return the figures under their stable names."""
        names = (
            "backend handoffs succeeded failed unresolved corrupt_pages bytes_moved seconds "
            "p50_ms p99_ms heal_s ranks_agree"
        )
        figures = {name: _rounded(getattr(self, name)) for name in names.split()}
        if self.recover_s is not None:
            figures["recover_s"] = _rounded(self.recover_s)
        return figures


@dataclass(slots=True)
class Times:
    """When things happened, in seconds on the driver's monotonic clock; None for not at all."""

    begin_s: float
    end_s: float
    killed_s: float | None = None
    failed_everywhere_s: float | None = None
    ready_again_s: float | None = None
    healed_s: float | None = None
    coordinator_killed_s: float | None = None
    recovered_s: float | None = None

    def since_coordinator_kill(self, moment_s: float | None) -> float | None:
        """How long after the kill of the coordinator a moment was."""
        if moment_s is None or self.coordinator_killed_s is None:
            return None
        return moment_s - self.coordinator_killed_s

    def since_kill(self, moment_s: float | None) -> float | None:
        """How long after the kill a moment was."""
        return None if moment_s is None or self.killed_s is None else moment_s - self.killed_s


def summarize(
    book: Book, backend: str, layout: Layout, world_size: int, times: Times, problems: list[str]
) -> Summary:
    """Sum up a book; ``problems`` are what the run itself met."""
    over = book.settled
    good = [handoff for handoff in over if handoff.outcome == ""]
    failed = Counter(handoff.outcome for handoff in over if handoff.outcome)
    corrupt = sum(handoff.corrupt_pages for handoff in [*over, *book.open.values()])
    latencies = [handoff.seconds for handoff in good if handoff.seconds >= 0]
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if latencies else (None, None)
    problems = [*problems, *book.disagreements]
    problems += [f"the coordinator refused: {refusal}" for refusal in book.refusals]
    problems += [f"unresolved: {handoff.missing()}" for handoff in book.open.values()]
    if corrupt:
        problems.append(f"{corrupt} pages did not hold what they must after a success")
    return Summary(
        backend=backend,
        handoffs=len(over) + len(book.open),
        succeeded=len(good),
        failed=dict(failed.most_common()),
        unresolved=len(book.open),
        corrupt_pages=corrupt,
        bytes_moved=sum(_moved_pages(handoff) for handoff in good)
        * sum(layout.pool_bytes(1, world_size, rank) for rank in range(world_size)),
        seconds=times.end_s - times.begin_s,
        p50_ms=None if p50 is None else p50 * 1000,
        p99_ms=None if p99 is None else p99 * 1000,
        heal_s=times.since_kill(times.healed_s),
        ranks_agree=not book.disagreements,
        failed_everywhere_s=times.since_kill(times.failed_everywhere_s),
        restart_s=times.since_kill(times.ready_again_s),
        recover_s=times.since_coordinator_kill(times.recovered_s),
        problems=tuple(problems),
        examples={handoff.outcome: handoff.failure for handoff in over if handoff.outcome},
    )


def _moved_pages(handoff: Handoff) -> int:
    return handoff.request.pages - handoff.request.prefix_pages


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
