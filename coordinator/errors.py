"""The errors of this project: what happened, where, and what to do.

No exception of a library leaves the package; each is turned into one of these where it is met.
"""

from __future__ import annotations

import errno
from typing import Final

#: What a process, or its host, can be short of for a while.
_WANTS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM, errno.ENOBUFS}


class CoordinatorError(Exception):
    """The base of every error that this package raises."""


class ConfigError(CoordinatorError):
    """A configuration cannot be used. Every mistake is a line of its own in ``problems``."""

    def __init__(self, problems: list[str]) -> None:
        """Keep all problems; the text is one problem per line."""
        super().__init__("\n".join(problems))
        self.problems = problems


class ProtocolError(CoordinatorError):
    """A frame is not a message of this protocol, or breaks one of its bounds."""


class LayoutError(CoordinatorError):
    """A KV layout is impossible, or two layouts do not fit each other."""


class PoolError(CoordinatorError):
    """A KV pool cannot be allocated, mapped, or does not hold the pages named."""


class PoolBusyError(PoolError):
    """Another worker still sends from the pool; it may be free later."""


class RefusedError(CoordinatorError):
    """The coordinator refused a rank's registration; the text says why and what to change."""


class NotReadyError(CoordinatorError):
    """The coordinator or a group was not ready in time; the text names what is missing."""


class QueueFullError(CoordinatorError):
    """The client's queue towards an absent coordinator is full."""


class ClosedError(CoordinatorError):
    """The client was closed, or its I/O thread has died; the text carries the cause."""


class NoAnswerError(CoordinatorError):
    """No coordinator answers an operator's call; the text says where it was looked for."""


class CallRefusedError(CoordinatorError):
    """A coordinator refused an operator's call; the text is its reason."""


class InvalidTransitionError(CoordinatorError):
    """The state machine got an event that its table does not know. The state is unchanged."""


class WorkerError(CoordinatorError):
    """A transfer worker could not be started or does not obey."""


def may_pass(error: BaseException | None) -> bool:
    """Whether an error comes from a want of descriptors, locks or memory: later the same may succeed."""
    while error is not None:
        if getattr(error, "errno", None) in _WANTS:
            return True
        error = error.__cause__
    return False
