"""The router of a replay: makes a request of each prompt, and chooses the engines for it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.replay.trace import BLOCK_TOKENS
from coordinator.sim.wire import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.replay.trace import Prompt
    from coordinator.sim.book import Handoff, Party
    from coordinator.sim.group import EngineGroup

#: Prefill computes a prompt in chunks of so many tokens, each in so many seconds of the trace ...
_CHUNK_TOKENS: Final = 2048
_CHUNK_S: Final = 0.1
#: ... and decode makes a token of the answer in so many.
_TOKEN_S: Final = 0.025


@dataclass(frozen=True, slots=True)
class Pace:
    """What the times and lengths of a trace are in a replay.

    Attributes:
        speed: seconds of the trace in a second of the clock.
        step_s: how long a step of an engine takes, on the clock.
        page_tokens: tokens in a page.
        pool_pages: pages of an engine.

    """

    speed: float
    step_s: float
    page_tokens: int
    pool_pages: int

    def steps(self, trace_s: float) -> int:
        """How many steps so many seconds of the trace are; 1 at least."""
        return max(1, round(trace_s / self.speed / self.step_s))

    def pages(self, tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-tokens // self.page_tokens)

    @property
    def chunk_pages(self) -> int:
        """How many pages prefill computes in one piece, of a prompt that has as many."""
        return max(1, _CHUNK_TOKENS // self.page_tokens)

    def takes_s(self, prompt: Prompt) -> float:
        """How long prefill and decode are busy with a prompt at least, on the clock; prefix or not."""
        chunks = -(-self.pages(prompt.input_tokens) // self.chunk_pages)
        steps = chunks * self.steps(_CHUNK_S) + self.steps(prompt.output_tokens * _TOKEN_S)
        return steps * self.step_s


class Cache:
    """Which blocks of prompts a decode engine still has, by what it has received; the least used go first."""

    def __init__(self, blocks: int) -> None:
        """Remember so many blocks at most."""
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many blocks from the beginning are there."""
        return next((number for number, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """Remember a prompt, the end of it less long than its beginning."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)


class Router:
    """Gives each prompt to the engines that have the fewest pages in hand.

    Attributes:
        prompt_pages: of all requests so far.
        prefix_pages: how many of them decode had already.

    """

    def __init__(self, prefill: Sequence[EngineGroup], decode: Sequence[EngineGroup], pace: Pace) -> None:
        """Choose among these engines."""
        self.prompt_pages = 0
        self.prefix_pages = 0
        self._engines = (prefill, decode)
        self._pace = pace
        self._load = {group.name: 0 for group in (*prefill, *decode)}
        self._caches: dict[Party, Cache] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._room = 0

    def route(self, prompt: Prompt) -> tuple[Request, EngineGroup, EngineGroup] | None:
        """Choose a prefill and a decode engine, and make their request; None while there is none."""
        ready = [[group for group in groups if group.is_ready] for groups in self._engines]
        if not all(ready):
            return None
        prefill, decode = (min(groups, key=lambda group: self._load[group.name]) for groups in ready)
        request = self._request(prompt, self._cache(decode.party))
        for group in (prefill, decode):
            self._load[group.name] += request.pages
        self._blocks[request.room] = prompt.blocks
        self.prompt_pages += request.pages
        self.prefix_pages += request.prefix_pages
        return request, prefill, decode

    def over(self, handoff: Handoff) -> None:
        """Take note that a handoff is settled: who has less in hand, and what decode has now."""
        for party in (handoff.prefill, handoff.decode):
            self._load[party.group] -= handoff.request.pages
        blocks = self._blocks.pop(handoff.request.room)
        if handoff.outcome == "":
            self._cache(handoff.decode).add(blocks)

    def forget(self, party: Party) -> None:
        """Take note that an engine was killed: what it had is gone."""
        self._caches.pop(party, None)

    def _cache(self, party: Party) -> Cache:
        tokens = self._pace.pool_pages * self._pace.page_tokens
        return self._caches.setdefault(party, Cache(max(1, tokens // BLOCK_TOKENS)))

    def _request(self, prompt: Prompt, cache: Cache) -> Request:
        pace = self._pace
        pages = pace.pages(prompt.input_tokens)
        prefix_tokens = min(cache.prefix(prompt.blocks) * BLOCK_TOKENS, prompt.input_tokens)
        self._room += 1
        return Request(
            self._room,
            pages,
            chunk_pages=min(pages, pace.chunk_pages),
            chunk_steps=pace.steps(_CHUNK_S),
            # A page that is shared only in part travels.
            prefix_pages=prefix_tokens // pace.page_tokens,
            answer_steps=pace.steps(prompt.output_tokens * _TOKEN_S),
        )
