"""A decode rank: offers pages, and checks every one of them once the handoff has succeeded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from coordinator.sim.engine import Client, Engine, Sabotage, Work, sentence
from coordinator.sim.pattern import aux_of
from coordinator.sim.wire import Ended, Started

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from coordinator.messages import Outcome
    from coordinator.sim.pattern import Section
    from coordinator.sim.wire import Request


class DecodeClient(Client, Protocol):
    """What is used of ``coordinator.client.DecodeRank``."""

    def offer(self, room: int, pages: NDArray[np.int32], prefix_pages: int = 0) -> None:
        """Say that pages are ready for a room."""


class DecodeEngine(Engine):
    """Receives, checks, holds the pages for as long as an answer takes, and gives them back."""

    def __init__(
        self, client: DecodeClient, sections: list[Section], sabotage: Sabotage = Sabotage.NONE
    ) -> None:
        """Start without rooms."""
        super().__init__(client, sections, sabotage)
        self._decode = client
        self._answering: list[Work] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated."""
        return bool(self._answering)

    def _announce(self, request: Request) -> None:
        """Say nothing: an offer is the first sign of a room from decode."""

    def _start(self, work: Work) -> None:
        request, pages = work.request, work.pages
        # The prefix stands for what decode's cache holds from earlier prompts.
        self._pattern.fill(pages[: request.prefix_pages], request.room, request.generation)
        self._decode.offer(request.room, pages[request.prefix_pages :], request.prefix_pages)
        self._reports.append(Started(request.room, request.generation))

    def _work(self) -> None:
        """Generate a part of each answer."""
        for work in self._answering:
            work.steps -= 1
        complete = [work for work in self._answering if not work.steps]
        if complete:
            self._answering = [work for work in self._answering if work.steps]
            for work in complete:
                super()._quiet(work)
            # The next step may be long in coming.
            self._admit()

    def _quiet(self, work: Work) -> None:
        """Free the pages, unless an answer needs them."""
        if work.steps:
            self._answering.append(work)
        else:
            super()._quiet(work)

    def _ended(self, work: Work, outcome: Outcome) -> Ended:
        request, failure = work.request, outcome.failure
        if failure is not None:
            return Ended(
                request.room, request.generation, outcome.attempt, failure.reason.value, sentence(failure)
            )
        work.steps = request.answer_steps
        return Ended(
            request.room,
            request.generation,
            outcome.attempt,
            "",
            corrupt_pages=self._count_corrupt(work, outcome.aux),
        )

    def _count_corrupt(self, work: Work, aux: bytes) -> int:
        """Count wrong pages. Wrong side data, or a success without pages, spoils all of them."""
        request, pages = work.request, work.pages
        if not pages.size or aux != aux_of(request.room, request.generation):
            return request.pages
        if self._sabotage is Sabotage.CORRUPT_PAGE:
            self._sabotage = Sabotage.NONE
            self._sections[-1].words[-1, pages[-1], -1, -1, -1] ^= 1
        return int(self._pattern.wrong(pages, request.room, request.generation).size)
