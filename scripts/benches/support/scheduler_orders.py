"""What the driver of the polling bench tells its schedulers, and what they answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: How a scheduler learns what has ended: by asking every sender, or from a head token.
Way = Literal["polling", "head"]


class World(NamedTuple):
    """The first word to a prefill rank: where the ranks meet, and who asks the senders."""

    rank: int
    size: int
    meeting: str
    sglang: bool


class Begin(NamedTuple):
    """Take rooms ``first`` to ``last`` on, for both ways; they never end. The answer is ``begun``."""

    first: int
    last: int


class Steps(NamedTuple):
    """Make steps in which nothing ends. The answer is a list: what retiring cost in each, seconds.

    Attributes:
        way: how.
        number: of steps.
        forward_s: how long an engine computes in each.
        late_every: the last rank is late in every so many steps; 0: never.

    """

    way: Way
    number: int
    forward_s: float = 0.0
    late_every: int = 0


class Retire(NamedTuple):
    """See rooms ``first`` to ``last`` end, ``pace_s`` apart.

    A rank answers ``waiting``; it is told the moment of the first end, on the monotonic clock; it
    answers ``Retired`` in the end.
    """

    way: Way
    first: int
    last: int
    pace_s: float
    forward_s: float

    @property
    def rooms(self) -> range:
        """The rooms."""
        return range(self.first, self.last + 1)


class Retired(NamedTuple):
    """When a rank has retired each room, and in which of the order's steps; with polling, when it ended."""

    retired_s: list[float]
    steps: list[int]
    ended_s: list[float]


Order = Begin | Steps | Retire
