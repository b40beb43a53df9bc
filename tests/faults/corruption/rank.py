"""Engines that use pages again the instant they get them back, and look at every word.

A page is ours, or a room has it. What was written into one that is ours must still be there when it is
given to a room, and at the end. When a room gives it back, each word must be what was there before or
what the room brings, and after a success the latter; on the sending side nothing may have changed.

The switch in the environment makes an engine do what must not be done: take its pages back with the
outcome. It is how the test proves that it can fail.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from coordinator.messages import Outcome, Released
from coordinator.sim import rank
from coordinator.sim.decode import DecodeEngine
from coordinator.sim.prefill import PrefillEngine
from tests.faults.corruption.contents import Contents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.messages import Event
    from coordinator.sim.decode import DecodeClient
    from coordinator.sim.engine import Sabotage, Work
    from coordinator.sim.pattern import Section
    from coordinator.sim.prefill import PrefillClient
    from coordinator.sim.settings import RankSettings
    from coordinator.sim.wire import LastState
    from tests.faults.corruption.contents import Pages

#: The role that does not wait for the release.
HASTY: Final = "TEST_HASTY_ROLE"
#: How a line of a rank's log begins that tells of a wrong page.
FOUND: Final = "FOREIGN BYTES"
#: Stand for rooms in what engines write for themselves; real rooms are not negative.
_OURS_AT_PREFILL: Final = -1
_OURS_AT_DECODE: Final = -2


class Hasty:
    """A client that releases pages with the outcome, whether they are quiet or not."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - any of the two clients
        self._client = client

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the client has
        return getattr(self._client, name)

    def drain(self, through: bytes | None = None) -> Sequence[Event]:
        """Follow each outcome with a release at once, and leave out the true one."""
        events: list[Event] = []
        for event in self._client.drain(through=through):
            if isinstance(event, Outcome):
                events += [event, Released(event.room, event.attempt)]
        return events


def tell(where: str, pages: Pages) -> None:
    """Say which pages hold what they must not."""
    if pages.size:
        sys.stderr.write(f"{FOUND} {where}: pages {pages.tolist()}\n")
        sys.stderr.flush()


class CarefulPrefill(PrefillEngine):
    """Sends, and gives pages back unchanged."""

    def __init__(
        self, client: PrefillClient, sections: list[Section], number: int, sabotage: Sabotage
    ) -> None:
        hasty = os.environ.get(HASTY) == "prefill"
        super().__init__(Hasty(client) if hasty else client, sections, number, sabotage)
        self._pattern = self._contents = Contents(sections, _OURS_AT_PREFILL)

    def _start(self, work: Work) -> None:
        tell(f"before {work.owner} at prefill", self._contents.changed(work.pages))
        super()._start(work)

    def _release(self, released: Released) -> bool:
        work = self._unreleased.get((released.room, released.attempt))
        if work is not None and work.pages.size:
            tell(f"of {work.owner} at prefill", self._contents.changed(work.pages))
            self._contents.use(work.pages)
        return super()._release(released)

    def _final(self) -> LastState:
        tell("at the end at prefill", self._contents.changed(self._contents.everything))
        return super()._final()


class CarefulDecode(DecodeEngine):
    """Receives, and knows at each moment what may have been written where."""

    def __init__(self, client: DecodeClient, sections: list[Section], sabotage: Sabotage) -> None:
        # Who does not wait does not look either: there is nothing yet to see.
        self._looks = os.environ.get(HASTY) != "decode"
        super().__init__(client if self._looks else Hasty(client), sections, sabotage)
        self._pattern = self._contents = Contents(sections, _OURS_AT_DECODE)
        self._succeeded: set[tuple[int, int]] = set()

    def _start(self, work: Work) -> None:
        tell(f"before {work.owner} at decode", self._contents.changed(work.pages))
        super()._start(work)

    def _end(self, outcome: Outcome) -> bool:
        known = super()._end(outcome)
        if known and outcome.succeeded:
            self._succeeded.add((outcome.room, outcome.attempt))
        return known

    def _release(self, released: Released) -> bool:
        key = (released.room, released.attempt)
        work = self._unreleased.get(key)
        if work is not None and work.pages.size:
            if self._looks:
                self._look(work, succeeded=key in self._succeeded)
            self._contents.use(work.pages)
        self._succeeded.discard(key)
        return super()._release(released)

    def _look(self, work: Work, *, succeeded: bool) -> None:
        room, generation = work.owner
        if succeeded:
            wrong = work.pages[self._contents.wrong(work.pages, room, generation)]
            tell(f"of {work.owner} at decode, after its success", wrong)
        else:
            foreign = self._contents.foreign(work.pages, room, generation)
            tell(f"of {work.owner} at decode, after its failure", foreign)

    def _final(self) -> LastState:
        tell("at the end at decode", self._contents.changed(self._contents.everything))
        return super()._final()


def run(settings: RankSettings) -> int:
    """Be a rank."""
    return rank.run(settings, rank.Engines(CarefulPrefill, CarefulDecode))
