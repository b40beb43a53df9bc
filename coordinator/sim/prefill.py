"""A prefill rank: computes prompts in chunks and sends each chunk as soon as it stands in memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from coordinator.sim.engine import Client, Engine, Sabotage, Work, sentence
from coordinator.sim.pattern import aux_of
from coordinator.sim.wire import Completed, Ended, Started

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from coordinator.messages import Outcome
    from coordinator.sim.pattern import Section
    from coordinator.sim.wire import Request


class PrefillClient(Client, Protocol):
    """What is used of ``coordinator.client.PrefillRank``."""

    def open(self, room: int) -> None:
        """Say that a room was queued."""

    def send(self, room: int, pages: NDArray[np.int32], *, last: bool, aux: bytes = b"") -> None:
        """Hand the next pages of a room over."""


class PrefillEngine(Engine):
    """Every step computes a part of a chunk of each room that has pages."""

    def __init__(
        self, client: PrefillClient, sections: list[Section], rank: int, sabotage: Sabotage = Sabotage.NONE
    ) -> None:
        """Start without rooms."""
        super().__init__(client, sections, sabotage)
        self._prefill = client
        self._rank = rank
        self._computing: dict[int, Work] = {}

    @property
    def busy(self) -> bool:
        """Whether a prompt is being computed."""
        return bool(self._computing)

    def _announce(self, request: Request) -> None:
        self._prefill.open(request.room)

    def _start(self, work: Work) -> None:
        self._computing[work.request.room] = work

    def _work(self) -> None:
        for work in list(self._computing.values()):
            work.steps += 1
            if work.steps >= work.request.chunk_steps:
                work.steps = 0
                self._send_chunk(work)

    def _send_chunk(self, work: Work) -> None:
        request, pages, first = work.request, work.pages, work.sent
        chunk = pages[first : first + request.chunk_pages]
        self._pattern.fill(chunk, request.room, request.generation, first)
        work.sent = first + chunk.size
        last = work.sent == request.pages
        # The first token is sampled on every rank, but only rank 0's is passed on.
        aux = aux_of(request.room, request.generation) if last and self._rank == 0 else b""
        self._prefill.send(request.room, chunk, last=last, aux=aux)
        if first == 0:
            self._reports.append(Started(request.room, request.generation))
        if last:
            work.complete_s = time.monotonic()
            del self._computing[request.room]
            self._reports.append(Completed(request.room, request.generation))

    def _ended(self, work: Work, outcome: Outcome) -> Ended:
        self._computing.pop(outcome.room, None)
        request, failure = work.request, outcome.failure
        return Ended(
            request.room,
            request.generation,
            outcome.attempt,
            failure.reason.value if failure else "",
            sentence(failure) if failure else "",
            seconds=-1.0 if work.complete_s is None else time.monotonic() - work.complete_s,
        )
