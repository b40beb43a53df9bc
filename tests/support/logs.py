"""What the code under test logs, in memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from coordinator import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import EventDict, WrappedLogger


class Captured(list[dict[str, Any]]):
    """Log entries in order; each a dict with ``event``, ``level`` and the keys of the call."""

    @property
    def events(self) -> list[str]:
        """The names alone."""
        return [entry["event"] for entry in self]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The entries of one event."""
        return [entry for entry in self if entry["event"] == event]


@contextmanager
def capture(level: logs.Level = "debug", now_s: Callable[[], float] | None = None) -> Iterator[Captured]:
    """Collect every entry of this process from ``level`` up; nothing is written meanwhile.

    With ``now_s``, each gets the key ``at_s``: on a loop whose time is virtual, the wall's tells little.
    """
    captured = Captured()

    def collect(_logger: WrappedLogger, _level: str, entry: EventDict) -> EventDict:
        captured.append(dict(entry) if now_s is None else {"at_s": round(now_s(), 3), **entry})
        raise structlog.DropEvent

    # All loggers share this list, also those that exist already.
    processors = structlog.get_config()["processors"]
    processors_before, level_before = processors[:], logs.level()
    processors[:] = [collect]
    logs.set_level(level)
    try:
        yield captured
    finally:
        processors[:] = processors_before
        logs.set_level(level_before)
