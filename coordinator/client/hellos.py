"""When to say ``Hello``: until it is answered, and not too often.

Sans-IO: no socket, no clock.
"""

from __future__ import annotations

from typing import Final

#: Two that are asked for are at least this far apart.
_INTERVAL_S: Final = 0.05
#: So many in a row without an answer, and the connection is made anew.
_PER_CONNECTION: Final = 5
_NEVER: Final = float("inf")


class Hellos:
    """The schedule of one conversation.

    Attributes:
        due_s: when to say the next one; infinite when the last was answered.

    """

    __slots__ = ("_retry_s", "_said_at_s", "_unanswered", "due_s")

    def __init__(self, retry_s: float, now_s: float) -> None:
        """Say the first one at once; one that is not answered is said again after ``retry_s``."""
        self._retry_s = retry_s
        self._said_at_s = -_NEVER
        self._unanswered = 0
        self.due_s = now_s

    def said(self, now_s: float) -> None:
        """One was said."""
        self._said_at_s = now_s
        self.due_s = now_s + self._retry_s
        self._unanswered += 1

    def ask(self, now_s: float) -> None:
        """One is wanted, soon but not at once after the last; not while its answer is awaited."""
        if not self._unanswered:
            self.due_s = max(now_s, self._said_at_s + _INTERVAL_S)

    def welcomed(self) -> None:
        """It was answered with a ``Welcome``: none is due any more."""
        self._unanswered = 0
        self.due_s = _NEVER

    def answered(self) -> None:
        """The last one was answered otherwise, or was lost with its connection: await nothing."""
        self._unanswered = 0

    def given_up(self, now_s: float) -> bool:
        """Whether so many stay unanswered that the connection must be made anew; told once."""
        if self._unanswered < _PER_CONNECTION or now_s < self.due_s:
            return False
        self._unanswered = 0
        return True
