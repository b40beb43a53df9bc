"""A transfer of which its link says what has become, because one poll goes on with all of the link's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.base import Status, Transfer

if TYPE_CHECKING:
    from backends.base import BackendError


class OwnedTransfer(Transfer):
    """A transfer that its link fails and ends."""

    __slots__ = ()

    def fail(self, error: BackendError) -> None:
        """It failed, and something may still move."""
        self.error, self.status = error, Status.FAILED

    def end(self, error: BackendError | None) -> None:
        """Nothing moves any more: done, or failed with ``error`` unless it had failed before."""
        if error is not None and self.error is None:
            self.error = error
        self.status = Status.DONE if self.error is None else Status.FAILED
        self.settled = True
