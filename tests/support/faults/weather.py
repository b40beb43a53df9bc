"""Bad weather for messages: some are lost, some come twice, some come late; the same with the same seed."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: A message that is late comes after so many others, at the most.
LATE_BY: Final = 3


class Weather(Generic[T]):
    """What becomes of one stream of messages.

    A late message waits for others to overtake it, not for time: where nothing follows, it never
    comes. So it is for streams that have heartbeats.

    Attributes:
        met: how many messages were ``lost``, ``doubled``, ``late``, and how many there were in ``all``.

    """

    def __init__(
        self, seed: int | str, *, lost: float = 0.05, doubled: float = 0.05, late: float = 0.10
    ) -> None:
        """Each of the three is the share of all messages, from 0 to 1."""
        self.met: Counter[str] = Counter()
        self._random = Random(seed)
        self._shares = {"lost": lost, "doubled": doubled, "late": late}
        self._waiting: list[tuple[int, T]] = []

    def let_through(self, message: T) -> list[T]:
        """Take the next message; returns what arrives now, in order."""
        self.met["all"] += 1
        match self._fate():
            case "lost":
                arrived = []
            case "doubled":
                arrived = [message]
                self._hold_back(message)
            case "late":
                arrived = []
                self._hold_back(message)
            case _:
                arrived = [message]
        self._waiting = [(left - 1, held) for left, held in self._waiting]
        arrived += [held for left, held in self._waiting if left < 0]
        self._waiting = [(left, held) for left, held in self._waiting if left >= 0]
        return arrived

    def clear_up(self) -> None:
        """Be good from now on. What waits comes behind the next message."""
        self._shares = dict.fromkeys(self._shares, 0.0)
        self._waiting = [(0, held) for _, held in self._waiting]

    def _fate(self) -> str:
        drawn = self._random.random()
        for fate, share in self._shares.items():
            if drawn < share:
                self.met[fate] += 1
                return fate
            drawn -= share
        return ""

    def _hold_back(self, message: T) -> None:
        self._waiting.append((self._random.randint(1, LATE_BY), message))
