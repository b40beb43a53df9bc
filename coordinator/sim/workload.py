"""Which requests a router sees: a seeded mix of sizes, prefixes, speeds and rooms."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Final

from coordinator.sim.wire import Request

_MAX_PAGES: Final = 64
_MAX_CHUNKS: Final = 4
_MAX_CHUNK_STEPS: Final = 3
#: One request in so many has a prefix in decode's cache, or is a room used again.
_ONE_WITH_PREFIX: Final = 8
_ONE_USED_AGAIN: Final = 10
#: Rooms that may be used again.
_REMEMBERED_ROOMS: Final = 64
#: A slow prefill computes this many chunks, each in this many steps: half a second of 2 ms steps.
_SLOW_CHUNKS: Final = 16
_SLOW_STEPS: Final = 16


class Workload:
    """Makes requests; the same seed and the same history make the same ones."""

    def __init__(self, seed: int, pool_pages: int) -> None:
        """Prompts take at most a quarter of a pool, so that several fit into it."""
        self._random = random.Random(seed)  # noqa: S311 - a simulation wants the same numbers again
        self._max_pages = max(1, min(_MAX_PAGES, pool_pages // 4))
        self._over: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_ROOMS)

    def may_use_again(self, request: Request) -> None:
        """Let a later request use the room of one whose handoff is over."""
        self._over.append((request.room, request.generation + 1))

    def ordinary(self) -> Request:
        """Make a request of any size; now and then in a room that was used before."""
        pages = round(math.exp(self._random.uniform(0, math.log(self._max_pages))))
        room, generation = self._room()
        return Request(
            room,
            pages,
            chunk_pages=math.ceil(pages / self._random.randint(1, _MAX_CHUNKS)),
            chunk_steps=self._random.randint(1, _MAX_CHUNK_STEPS),
            generation=generation,
            prefix_pages=self._random.randint(1, pages) if self._one_in(_ONE_WITH_PREFIX) else 0,
        )

    def slow(self) -> Request:
        """Make a request that is in prefill for several hundred steps."""
        pages = max(1, self._max_pages // 2)
        room, generation = self._room()
        return Request(
            room,
            pages,
            chunk_pages=math.ceil(pages / _SLOW_CHUNKS),
            chunk_steps=_SLOW_STEPS * _SLOW_CHUNKS // min(_SLOW_CHUNKS, pages),
            generation=generation,
        )

    def _room(self) -> tuple[int, int]:
        """Choose a room and its generation."""
        if self._over and self._one_in(_ONE_USED_AGAIN):
            return self._over.popleft()
        return self._random.getrandbits(64) | 1, 0

    def _one_in(self, count: int) -> bool:
        return self._random.randrange(count) == 0
