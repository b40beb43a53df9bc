"""Pages that are held because something may still move in them, counted against a budget.

What is here has failed, and is not quiet. It is never freed by time or by pressure: past the budget
the coordinator is not ready, and an operator decides what to restart.
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

    def __len__(self) -> int:
        """How many handoffs are held."""
        return len(self._handoffs)

    @property
    def budget_bytes(self) -> int:
        """How much may be held before that is a trouble."""
        return self._budget_bytes()

    @property
    def trouble(self) -> str:
        """Say what is wrong; empty while the budget holds."""
        if not self._over:
            return ""
        return (
            f"{len(self)} failed handoffs hold {self.held_bytes} bytes that are not quiet, over "
            f"release.quarantine_bytes ({self._budget_bytes()})"
        )

    def handoffs(self, most: int) -> list[Handoff]:
        """Return those that are held, as they came, but no more than ``most`` of them."""
        return list(islice(self._handoffs, most))

    def hold(self, handoff: Handoff, size_bytes: int) -> None:
        """Count a failed handoff, of whose moves ``size_bytes`` may still be under way."""
        self._handoffs[handoff] = size_bytes
        self.held_bytes += size_bytes
        self.judge()

    def let_go(self, handoff: Handoff) -> None:
        """Both sides of a handoff are quiet."""
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
            _log.error("quarantine.over", held_bytes=self.held_bytes, handoffs=len(self), error=self.trouble)
        else:
            _log.info("quarantine.under", held_bytes=self.held_bytes, handoffs=len(self))
