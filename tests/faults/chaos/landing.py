"""Which pages are still read or written; one that is given back must be quiet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from coordinator.messages import Move
    from tests.faults.chaos.ranks import StormRank

_FOR_EVER = float("inf")


class Landing:
    """Bytes on their way, by rank (one life of it) and page, at both of their ends."""

    def __init__(self, random: Random, drain_s: float) -> None:
        """Bytes of a move that was posted and not done land for up to ``drain_s`` after its end."""
        self._random = random
        self._drain_s = drain_s
        self._until_s: dict[tuple[str, int], float] = {}

    def begins(self, source: str, move: Move) -> None:
        """A worker reads pages of ``source`` and writes."""
        self._note(source, move, _FOR_EVER, _FOR_EVER)

    def ends(self, source: str, move: Move, *, lands: bool) -> None:
        """Nothing is read any more; with ``lands`` something may still be under way."""
        now_s = asyncio.get_running_loop().time()
        late_s = self._random.uniform(0.0, self._drain_s) if lands else 0.0
        self._note(source, move, now_s, now_s + late_s)

    def check_quiet(self, rank: StormRank, pages: tuple[int, ...]) -> None:
        """A rank is told that these pages of its are quiet."""
        peer = f"{rank.name}#{rank.hello.instance:x}"
        now_s = asyncio.get_running_loop().time()
        for page in pages:
            until_s = self._until_s.get((peer, page), 0.0)
            assert until_s <= now_s, f"page {page} of {rank.name} is given back and still in use"

    def _note(self, source: str, move: Move, read_s: float, written_s: float) -> None:
        for page in memoryview(move.source_pages).cast("i"):
            self._until_s[source, page] = read_s
        for page in memoryview(move.destination_pages).cast("i"):
            self._until_s[move.peer, page] = written_s
