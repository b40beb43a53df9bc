"""What is counted. A handoff counts once, not once per rank."""

from __future__ import annotations

from collections import Counter


class Counters:
    """The coordinator's counters since its start.

    ``opened == succeeded + sum(failed.values()) + in flight`` holds at every moment.
    """

    __slots__ = (
        "bytes_moved",
        "failed",
        "late",
        "malformed",
        "opened",
        "ranks_lost",
        "refused",
        "succeeded",
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
        self.worker_deaths = 0
