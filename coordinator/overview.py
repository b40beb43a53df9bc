"""What the coordinator knows of itself at this moment, for its metrics, its health and its operators.

It only looks. Everything here costs the same whatever is in flight, or stops at a bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

import coordinator
from coordinator import logs
from coordinator.events import State
from coordinator.messages import Role
from coordinator.routes import RouteState
from coordinator.worker.supervisor import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from coordinator.config import Config
    from coordinator.groups import Group
    from coordinator.membership import Membership
    from coordinator.metrics import Counters
    from coordinator.quarantine import Quarantine
    from coordinator.rooms import Rooms
    from coordinator.routes import Crew
    from coordinator.transfers import Transfers

#: A handoff that is over its deadline by this much is not late, it is stuck.
STUCK_S: Final = 5.0
#: How many troubles of one kind are named before the rest is only counted.
NAMED: Final = 4


class Overview:
    """The parts of a coordinator, and what can be said of them.

    Attributes:
        config: the settings of today; a reload replaces them.
        broken: what has ended inside the coordinator that must not end before it does, and why.
        parts: what runs in threads of its own, and how to see whether it does.

    """

    version: str = coordinator.__version__
    config: Config
    counters: Counters
    rooms: Rooms
    membership: Membership
    transfers: Transfers
    quarantine: Quarantine

    def __init__(
        self,
        config: Config,
        epoch: int,
        counters: Counters,
        rooms: Rooms,
        membership: Membership,
        transfers: Transfers,
        quarantine: Quarantine,
    ) -> None:
        """Look at these."""
        self.config = config
        self.epoch = epoch
        self.counters = counters
        self.rooms = rooms
        self.membership = membership
        self.transfers = transfers
        self.quarantine = quarantine
        self.broken: dict[str, str] = {}
        self.parts: dict[str, Callable[[], bool]] = {"the writer of the log": logs.alive}
        self._started_at_s = self.now_s()

    @staticmethod
    def now_s() -> float:
        """Return the time on the loop's clock, on which every ``_at_s`` of the coordinator is."""
        return asyncio.get_running_loop().time()

    @property
    def uptime_s(self) -> float:
        """How long it has run."""
        return self.now_s() - self._started_at_s

    # Handoffs

    def in_flight(self) -> dict[str, int]:
        """Count the handoffs without a verdict by their state."""
        rooms = self.rooms
        past_prefill = len(rooms.past_prefill)
        return {
            State.OPEN.value: len(rooms.active) - past_prefill,
            State.WAITING.value: past_prefill - rooms.moving,
            State.MOVING.value: rooms.moving,
        }

    def oldest_s(self, now_s: float) -> float | None:
        """Age of the oldest handoff without a verdict. What is shown together is of one ``now_s``."""
        oldest = next(iter(self.rooms.active.values()), None)
        return None if oldest is None else now_s - oldest.opened_at_s

    def oldest_past_prefill_s(self, now_s: float) -> float | None:
        """How long the one has waited that waits longest since prefill-complete."""
        oldest = next(iter(self.rooms.past_prefill), None)
        return None if oldest is None else now_s - oldest.complete_at_s

    def quarantine_budget(self) -> int:
        """How many bytes may be held by what is not quiet."""
        return self.quarantine.budget_bytes

    # Groups, workers, links

    @property
    def groups(self) -> Iterable[Group]:
        """All groups."""
        return self.membership.groups.values()

    @property
    def crews(self) -> Iterable[Crew]:
        """All workers with their links."""
        return self.transfers.crews.values()

    def ranks(self) -> dict[tuple[str, ...], float]:
        """Count the ranks by group, role, and whether they are there and hear."""
        counts: dict[tuple[str, ...], float] = {}
        for group in self.groups:
            missing = len(group.missing())
            counts[group.name, group.role.value, "missing"] = missing
            counts[group.name, group.role.value, "ready"] = group.world_size - missing
        return counts

    @staticmethod
    def lag(group: Group) -> int:
        """How many events the slowest live rank of a group has not acknowledged."""
        return group.log.head - min((rank.acknowledged for rank in group.live), default=group.log.head)

    def links(self) -> Mapping[str, int]:
        """Count the links from workers to decode ranks by their state."""
        states = Counter(route.state.value for crew in self.crews for route in crew.routes.values())
        return {state.value: states[state.value] for state in RouteState}

    def workers(self) -> Mapping[str, int]:
        """Count the workers by their state."""
        states = Counter(crew.worker.state.value for crew in self.crews)
        return {state.value: states[state.value] for state in WorkerState}

    # Health

    def illness(self) -> list[str]:
        """Say what is wrong with the coordinator itself, so that only its restart helps; mostly nothing."""
        dead = [f"{part} does not run any more" for part, runs in self.parts.items() if not runs()]
        return dead + [f"{what} has ended: {why}" for what, why in self.broken.items()]

    def troubles(self) -> list[str]:
        """Say why this coordinator should get no new requests now; empty when it is ready (case C54)."""
        found = self.illness()
        if self.rooms.draining:
            found.append("draining: no new handoffs are admitted")
        found += self._stuck()
        found += _some(
            f"the {crew.worker.name} is not up: {crew.worker.trouble}"
            for crew in self.crews
            if crew.worker.trouble
        )
        found += _some(
            f"group {group.name} misses {', '.join(group.missing()[:NAMED])}"
            for group in self.groups
            if group.role is Role.PREFILL and not group.ready
        )
        if self.quarantine.trouble:
            found.append(self.quarantine.trouble)
        return found

    def _stuck(self) -> list[str]:
        """Say whether a handoff is past its deadline and still has no verdict.

        Those that wait longest come first; where the plain deadline is not over, none after it is either.
        """
        now_s = self.now_s()
        deadline_s = self.rooms.bounds.deadline_s
        for handoff in self.rooms.past_prefill:
            if handoff.complete_at_s + deadline_s + STUCK_S > now_s:
                break
            over_s = now_s - handoff.due_at_s
            if over_s > STUCK_S:
                return [f"room {handoff.room} is {over_s:.1f} s past its deadline and has no verdict"]
        return []


def _some(sentences: Iterable[str]) -> list[str]:
    """Return the first sentences, and how many more there are."""
    found = list(sentences)
    rest = len(found) - NAMED
    return found if rest <= 0 else [*found[:NAMED], f"and {rest} more of this kind"]
