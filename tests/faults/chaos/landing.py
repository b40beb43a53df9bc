"""Which pages are still read or written; one that is given back must be quiet."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from coordinator.messages import Move
    from tests.faults.chaos.ranks import StormRank


class Landing:
    """Bytes on their way, by rank (one life of it) and page, at both of their ends."""

    def __init__(self, random: Random, drain_s: float) -> None:
        """Bytes of a move that was posted and not done land for up to ``drain_s`` after its end."""
        self._random = random
        self._drain_s = drain_s
        self._moves: Counter[tuple[str, int]] = Counter()
        # An end of one move says nothing of what another one has left under way.
        self._until_s: dict[tuple[str, int], float] = {}

    def begins(self, source: str, move: Move) -> None:
        """A worker reads pages of ``source`` and writes."""
        self._moves.update(_ends(source, move))

    def ends(self, source: str, move: Move, *, lands: bool) -> None:
        """Nothing is read any more; with ``lands`` something may still be under way."""
        self._moves.subtract(_ends(source, move))
        late_s = self._random.uniform(0.0, self._drain_s) if lands else 0.0
        until_s = asyncio.get_running_loop().time() + late_s
        for page in memoryview(move.destination_pages).cast("i"):
            self._until_s[move.peer, page] = max(until_s, self._until_s.get((move.peer, page), 0.0))

    def check_quiet(self, rank: StormRank, pages: tuple[int, ...]) -> None:
        """A rank is told that these pages of its are quiet."""
        peer = f"{rank.name}#{rank.hello.instance:x}"
        now_s = asyncio.get_running_loop().time()
        for page in pages:
            is_quiet = not self._moves[peer, page] and self._until_s.get((peer, page), 0.0) <= now_s
            assert is_quiet, f"page {page} of {rank.name} is given back and still in use"


def _ends(source: str, move: Move) -> list[tuple[str, int]]:
    """The pages of a move, each with its rank, at both ends."""
    return [
        *((source, page) for page in memoryview(move.source_pages).cast("i")),
        *((move.peer, page) for page in memoryview(move.destination_pages).cast("i")),
    ]
