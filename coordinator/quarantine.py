"""Pages that are held because something may still move in them, counted against a budget.

What is here has failed, and is not quiet. It is never freed by time or by pressure: past the budget
the coordinator is not ready, and an operator decides what to restart. So it is when an engine that
moves the pages by itself leaves it open for long whether they are quiet: their bytes are not known.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from coordinator.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.handoff import Handoff

_log = get_logger()


class Quarantine:
    """The failed handoffs whose pages are not quiet.

    Attributes:
        held_bytes: what their moves may still touch, counted once for both ends.

    """

    def __init__(self, budget_bytes: Callable[[], int]) -> None:
        """Start empty; ``budget_bytes`` says how much may be held before that is a trouble."""
        self.held_bytes = 0
        self._budget_bytes = budget_bytes
        self._handoffs: dict[Handoff, int] = {}
        self._over = False
        self._open: dict[Handoff, None] = {}

    def __len__(self) -> int:
        """How many handoffs are held."""
        return len(self._handoffs)

    @property
    def budget_bytes(self) -> int:
        """How much may be held before that is a trouble."""
        return self._budget_bytes()

    @property
    def trouble(self) -> str:
        """Say what is wrong; empty while the budget holds and no engine leaves anything open."""
        return "; ".join(filter(None, (self._past_budget, self._left_open)))

    @property
    def _past_budget(self) -> str:
        if not self._over:
            return ""
        return (
            f"{len(self)} failed handoffs hold {self.held_bytes} bytes that are not quiet, over "
            f"release.quarantine_bytes ({self._budget_bytes()})"
        )

    @property
    def _left_open(self) -> str:
        first = next(iter(self._open), None)
        if first is None or first.prefill is None:
            return ""
        return (
            f"{len(self._open)} failed handoffs hold pages that their engine does not say to be quiet, the "
            f"first of them room {first.room} of {first.prefill.name}; if that lasts, restart the engine"
        )

    def handoffs(self, most: int) -> list[Handoff]:
        """Return those that are held, as they came, but no more than ``most`` of them."""
        return list(islice(self._handoffs, most))

    def hold(self, handoff: Handoff, size_bytes: int) -> None:
        """Count a failed handoff, of whose moves ``size_bytes`` may still be under way."""
        self._handoffs[handoff] = size_bytes
        self.held_bytes += size_bytes
        self.judge()

    def left_open(self, handoff: Handoff) -> None:
        """The engine that moves the pages by itself has not said in time that they are quiet."""
        self._open[handoff] = None

    def let_go(self, handoff: Handoff) -> None:
        """Both sides of a handoff are quiet."""
        self._open.pop(handoff, None)
        size_bytes = self._handoffs.pop(handoff, None)
        if size_bytes is not None:
            self.held_bytes -= size_bytes
            self.judge()

    def judge(self) -> None:
        """Compare what is held with the budget, and log it when the answer is another one than before."""
        over = self.held_bytes > self._budget_bytes()
        if over is self._over:
            return
        self._over = over
        if over:
            error = self._past_budget
            _log.error("quarantine.over", held_bytes=self.held_bytes, handoffs=len(self), error=error)
        else:
            _log.info("quarantine.under", held_bytes=self.held_bytes, handoffs=len(self))
