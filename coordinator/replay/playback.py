"""Plays a trace back: submits each prompt in its time, has things go wrong, sees what becomes of it all."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.replay.faults import Faults
from coordinator.replay.result import Result
from coordinator.replay.samples import Sample
from coordinator.sim.errors import SimulationError
from coordinator.sim.proc import children, private_bytes
from coordinator.sim.summary import Times, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.replay.router import Pace, Router
    from coordinator.replay.script import Fault
    from coordinator.replay.trace import Prompt
    from coordinator.sim.cluster import Cluster

#: How long is waited at most for reports before something else gets its turn.
_TURN_S: Final = 0.05
#: How often memory is looked at.
_SAMPLE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class PlaybackOptions:
    """How to play.

    Attributes:
        decode_tp: ranks of a decode engine.
        settle_s: without any handoff that ends, and any that begins, for so long and for as long as the
            longest prompt takes, the run has failed.

    """

    decode_tp: int
    settle_s: float = 90.0


class Playback:
    """One run over engines that are ready."""

    def __init__(
        self,
        cluster: Cluster,
        router: Router,
        pace: Pace,
        prompts: Sequence[Prompt],
        faults: Sequence[Fault],
        options: PlaybackOptions,
        tell: Callable[[str], None],
        tick: Callable[[], None],
    ) -> None:
        """Prepare; ``tell`` hears what happens, in sentences; ``tick`` is called often."""
        self._cluster = cluster
        self._router = router
        self._pace = pace
        self._prompts = deque(prompts)
        self._faults = Faults(cluster, router, faults, tell)
        self._options = options
        # An engine that generates a long answer does not stand still.
        self._patience_s = options.settle_s + max(map(pace.takes_s, prompts), default=0.0)
        self._tick = tick
        self._waiting: deque[Prompt] = deque()
        self._begun_at_s: dict[int, float] = {}
        self._samples: list[Sample] = []
        self._seen = 0
        self._behind_s = 0.0
        self._begin_s = self._moved_s = self._sampled_s = 0.0

    def run(self) -> Result:
        """Play to the end; never raises what the simulation itself brings about."""
        problems: list[str] = []
        self._begin_s = self._moved_s = time.monotonic()
        try:
            while self._prompts or self._waiting or self._faults.pending or self._cluster.book.open:
                self._turn()
        except SimulationError as error:
            problems.append(str(error))
        end_s = time.monotonic()
        # Also after a wait in vain: the last states tell who holds what.
        problems += self._cluster.finish_clean(self._options.settle_s)
        options, book = self._cluster.options, self._cluster.book
        times = Times(self._begin_s, end_s)
        summary = summarize(book, options.backend, options.layout, self._options.decode_tp, times, problems)
        return Result(
            summary=summary,
            speed=self._pace.speed,
            handoffs=[
                (self._begun_at_s[each.request.room], each.outcome, each.seconds) for each in book.settled
            ],
            samples=self._samples,
            faults=self._faults.done,
            behind_s=self._behind_s,
            prompt_pages=self._router.prompt_pages,
            prefix_pages=self._router.prefix_pages,
        )

    def _turn(self) -> None:
        now_s = (time.monotonic() - self._begin_s) * self._pace.speed
        while self._prompts and self._prompts[0].at_s <= now_s:
            self._behind_s = max(self._behind_s, (now_s - self._prompts[0].at_s) / self._pace.speed)
            self._waiting.append(self._prompts.popleft())
        self._submit(now_s)
        self._faults.tick(now_s)
        self._cluster.pump(self._pause_s(now_s))
        self._observe()
        if time.monotonic() - self._sampled_s >= _SAMPLE_S:
            self._sample(now_s)
        self._tick()

    def _pause_s(self, now_s: float) -> float:
        """How long there is nothing to do but to listen."""
        if not self._prompts:
            return _TURN_S
        return min(_TURN_S, max(0.0, self._prompts[0].at_s - now_s) / self._pace.speed)

    def _submit(self, now_s: float) -> None:
        """Give prompts to engines, as long as there are engines that are ready."""
        while self._waiting and (routed := self._router.route(self._waiting[0])) is not None:
            self._waiting.popleft()
            request, prefill, decode = routed
            self._begun_at_s[request.room] = now_s
            self._moved_s = time.monotonic()
            self._cluster.hand_off([request], prefill, decode)

    def _observe(self) -> None:
        """See what was settled since the last look.

        Raises:
            SimulationError: nothing has for long.

        """
        book = self._cluster.book
        for handoff in book.settled[self._seen :]:
            self._router.over(handoff)
            self._moved_s = time.monotonic()
        self._seen = len(book.settled)
        waited_s = time.monotonic() - self._moved_s
        if waited_s > self._patience_s and (book.open or self._waiting):
            message = (
                f"nothing has ended or begun for {waited_s:.0f} s, with {len(book.open)} handoffs open and "
                f"{len(self._waiting)} prompts waiting; the coordinator's last lines:\n"
                f"{self._cluster.coordinator.tail()}"
            )
            raise SimulationError(message)

    def _sample(self, now_s: float) -> None:
        self._sampled_s = time.monotonic()
        coordinator = self._cluster.coordinator.pid
        engines = [child.pid for group in self._cluster.groups.values() for child in group.children]
        memory = {
            "coordinator": private_bytes([coordinator]),
            "workers": private_bytes(children(coordinator)),
            "engines": private_bytes(engines),
            "router": private_bytes([os.getpid()]),
        }
        in_flight = len(self._cluster.book.open)
        self._samples.append(Sample(now_s, in_flight, len(self._waiting), memory))
