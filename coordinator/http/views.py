"""Looks up what is answered. A long list is looked up in slices, so that the loop is never held up."""

from __future__ import annotations

import asyncio
import heapq
import struct
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.http import answers
from coordinator.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator.groups import Group, Rank
    from coordinator.handoff import Handoff
    from coordinator.overview import Overview
    from coordinator.reasons import Failure

#: Handoffs that are looked at before the loop gets its turn: less than a millisecond.
SLICE: Final = 500
#: The same for those that are written down: some 15 µs each.
ANSWER_SLICE: Final = 100
#: A page of handoffs has this many, unless it is asked for otherwise; and at most that many.
PAGE: Final = 100
MAX_PAGE: Final = 1000
#: An order of handoffs: by when they were opened, then by room.
Place = tuple[float, int]
_PLACE: Final = struct.Struct(">dQ")


class Filter(msgspec.Struct, frozen=True):
    """Which handoffs are wanted; what is None is not looked at."""

    state: str | None = None
    group: str | None = None
    reason: str | None = None
    older_s: float | None = None
    after: Place | None = None

    def wants(self, handoff: Handoff, now_s: float) -> bool:
        """Whether a handoff is wanted."""
        if self.after is not None and place(handoff) <= self.after:
            return False
        if self.older_s is not None and now_s - handoff.opened_at_s < self.older_s:
            return False
        machine = handoff.machine
        if self.state is not None and machine.state != self.state:
            return False
        if self.reason is not None and (machine.failure is None or machine.failure.reason != self.reason):
            return False
        return self.group is None or any(group.name == self.group for group in handoff.groups)

    @property
    def looks_back(self) -> bool:
        """Whether handoffs are meant that may be over in every way."""
        return self.reason is not None or self.state in {"succeeded", "failed"}


def place(handoff: Handoff) -> Place:
    """Where a handoff stands in the order."""
    return handoff.opened_at_s, handoff.room


class Views:
    """Writes down what an ``Overview`` shows."""

    def __init__(self, overview: Overview) -> None:
        """Look there."""
        self.overview = overview
        self.followers: Callable[[], int] = lambda: 0

    def status(self) -> answers.Status:
        """Return the coordinator at a glance."""
        overview = self.overview
        counters = overview.counters
        reasons = overview.troubles()
        now_s = overview.now_s()
        return answers.Status(
            name=overview.config.service.name,
            version=overview.version,
            epoch=f"{overview.epoch:x}",
            backend=overview.config.backend.name,
            uptime_s=round(overview.uptime_s, 3),
            ready=not reasons,
            reasons=reasons,
            draining=overview.rooms.draining,
            in_flight=overview.in_flight(),
            oldest_s=_rounded(overview.oldest_s(now_s)),
            oldest_after_prefill_s=_rounded(overview.oldest_past_prefill_s(now_s)),
            unreleased=len(overview.rooms.unreleased),
            opened=counters.opened,
            succeeded=counters.succeeded,
            failed={reason: count for reason, count in counters.failed.items() if count},
            moved_bytes=counters.bytes_moved,
            late_events=sum(counters.late.values()),
            quarantine=self._quarantine_summary(),
            workers=dict(overview.workers()),
            links=dict(overview.links()),
            groups=[self._group_summary(group) for group in overview.groups],
            log_followers=self.followers(),
        )

    # Handoffs

    async def handoffs(self, wanted: Filter, limit: int) -> answers.Handoffs:
        """Return the first handoffs that are wanted."""
        found: list[Handoff] = []
        now_s = self.overview.now_s()
        for number, handoff in enumerate(self._all(looking_back=wanted.looks_back)):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            if wanted.wants(handoff, now_s):
                if len(found) == limit:
                    following = _written(place(found[-1]))
                    break
                found.append(handoff)
        else:
            following = None
        return answers.Handoffs(handoffs=await self._written_down(found), next=following)

    def _all(self, *, looking_back: bool) -> Iterator[Handoff]:
        """Yield the handoffs that are not over in every way, or all that are known; the oldest first."""
        rooms = self.overview.rooms
        over = set(rooms.unreleased)
        if looking_back:
            over.update(rooms.recent.values())
        # Those in flight are in order already, but for those of one instant; and few others are expected.
        return heapq.merge(_in_order(list(rooms.active.values())), sorted(over, key=place), key=place)

    async def _written_down(self, handoffs: list[Handoff]) -> list[answers.Handoff]:
        written: list[answers.Handoff] = []
        for start in range(0, len(handoffs), ANSWER_SLICE):
            if start:
                await asyncio.sleep(0)
            written += map(self.handoff, handoffs[start : start + ANSWER_SLICE])
        return written

    def handoff(self, handoff: Handoff) -> answers.Handoff:
        """Write down a handoff."""
        machine = handoff.machine
        over = machine.state.terminal
        until_s = handoff.concluded_at_s if over else self.overview.now_s()
        complete_s = handoff.complete_at_s
        return answers.Handoff(
            room=str(machine.room),
            attempt=machine.attempt,
            state=machine.state.value,
            prefill=handoff.prefill.name if handoff.prefill else None,
            decode=handoff.decode.name if handoff.decode else None,
            age_s=round(until_s - handoff.opened_at_s, 4),
            after_prefill_s=round(until_s - complete_s, 4) if complete_s else None,
            remaining_s=round(handoff.due_at_s - until_s, 4) if complete_s and not over else None,
            moved_bytes=handoff.moved_bytes,
            moving_bytes=sum(flight.size_bytes for flight in handoff.flights.values()),
            missing="" if over else handoff.missing(),
            failure=_failed(machine.failure),
            held=[side.value for side in machine.held],
        )

    def story(self, room: int) -> answers.Story | answers.Ended | None:
        """Return all that is known of a room's last handoff; None when it is not known at all."""
        rooms = self.overview.rooms
        handoff = rooms.active.get(room) or rooms.recent.get(room)
        if handoff is None:
            handoff = next((held for held in rooms.unreleased if held.room == room), None)
        ended = rooms.endings.get(room)
        if ended is not None and (handoff is None or handoff.machine.attempt < ended.attempt):
            return answers.Ended(room=str(room), attempt=ended.attempt, failure=_failed(ended.failure))
        return None if handoff is None else self._story(handoff)

    def _story(self, handoff: Handoff) -> answers.Story:
        machine = handoff.machine
        over = machine.state.terminal
        opened_s = handoff.opened_at_s
        first = answers.Step(at_s=0.0, state="open", cause="its first sign")
        steps = [
            answers.Step(at_s=round(step.at_s - opened_s, 4), state=step.state.value, cause=step.cause)
            for step in machine.story
        ]
        return answers.Story(
            handoff=self.handoff(handoff),
            ended_s=round(self.overview.now_s() - handoff.concluded_at_s, 4) if over else None,
            story=[first, *steps],
            ranks=[] if over else self._words(handoff),
            moves=[
                answers.Move(
                    link=flight.route.name,
                    link_state=flight.route.state.value,
                    move=flight.move,
                    size_bytes=flight.size_bytes,
                    ended=flight.ended,
                )
                for flight in handoff.flights.values()
            ],
        )

    def _words(self, handoff: Handoff) -> list[answers.RankWord]:
        """What each rank of both groups has said of a room."""
        sent, offered = handoff.machine.legs.sent(), handoff.machine.legs.offered()
        now_s = self.overview.now_s()
        words = []
        for group in handoff.groups:
            for number, rank in enumerate(group.ranks):
                if group.role is Role.PREFILL:
                    pages, last = sent.get(number, (0, False))
                    said = "complete" if last else "chunks" if number in sent else "nothing"
                else:
                    pages = offered.get(number, 0)
                    said = "offered" if number in offered else "nothing"
                words.append(
                    answers.RankWord(
                        rank=f"{group.name}/{number}",
                        said=said,
                        pages=pages,
                        alive=rank is not None and rank.alive,
                        silent_s=None if rank is None else round(now_s - rank.seen_at_s, 4),
                    )
                )
        return words

    # Groups, links, workers

    def groups(self) -> answers.Groups:
        """Return all groups."""
        return answers.Groups(groups=[self._group(group) for group in self.overview.groups])

    def peers(self) -> answers.Peers:
        """Return all links."""
        return answers.Peers(
            peers=[
                answers.Peer(
                    worker=crew.worker.rank.name,
                    peer=route.rank.name,
                    state=route.state.value,
                    moves=len(route.flights),
                    moving_bytes=sum(flight.size_bytes for flight in route.flights.values()),
                    failures=route.failures,
                    trouble=route.trouble,
                )
                for crew in self.overview.crews
                for route in crew.routes.values()
            ]
        )

    def workers(self) -> answers.Workers:
        """Return all workers."""
        return answers.Workers(
            workers=[
                answers.Worker(
                    rank=crew.worker.rank.name,
                    state=crew.worker.state.value,
                    lives=crew.worker.lives,
                    trouble=crew.worker.trouble,
                    hopeless=crew.worker.hopeless,
                    links=len(crew.routes),
                    moves=sum(len(route.flights) for route in crew.routes.values()),
                )
                for crew in self.overview.crews
            ]
        )

    async def quarantine(self) -> answers.Quarantine:
        """Return what is held, and by whom."""
        held = self.overview.quarantine.handoffs(MAX_PAGE)
        return answers.Quarantine(summary=self._quarantine_summary(), handoffs=await self._written_down(held))

    def admission(self) -> answers.Admission:
        """Return whether new handoffs are admitted."""
        rooms = self.overview.rooms
        return answers.Admission(draining=rooms.draining, in_flight=len(rooms.active))

    def _quarantine_summary(self) -> answers.QuarantineSummary:
        quarantine = self.overview.quarantine
        return answers.QuarantineSummary(
            handoffs=len(quarantine),
            held_bytes=quarantine.held_bytes,
            budget_bytes=quarantine.budget_bytes,
            trouble=quarantine.trouble,
        )

    def _group_summary(self, group: Group) -> answers.GroupSummary:
        return answers.GroupSummary(
            name=group.name,
            role=group.role.value,
            world_size=group.world_size,
            ready=group.ready,
            missing=group.missing(),
            in_flight=len(group.handoffs),
            lag=self.overview.lag(group),
        )

    def _group(self, group: Group) -> answers.Group:
        return answers.Group(
            name=group.name,
            role=group.role.value,
            world_size=group.world_size,
            ready=group.ready,
            missing=group.missing(),
            incarnation=group.incarnation,
            in_flight=len(group.handoffs),
            head=group.log.head,
            stable=group.stable,
            kept_events=len(group.log),
            layout=msgspec.structs.asdict(group.layout),
            ranks=[self._rank(rank) for rank in group.ranks if rank is not None],
        )

    def _rank(self, rank: Rank) -> answers.Rank:
        head = rank.group.log.head
        return answers.Rank(
            name=rank.name,
            alive=rank.alive,
            listening=rank.listening,
            pid=rank.hello.process.pid,
            pool_bytes=rank.hello.pool.size_bytes,
            silent_s=round(self.overview.now_s() - rank.seen_at_s, 4),
            lag=head - rank.acknowledged,
            unapplied=head - rank.applied,
        )


def _failed(failure: Failure | None) -> answers.Failed | None:
    if failure is None:
        return None
    return answers.Failed(
        reason=failure.reason.value,
        origin=failure.origin,
        message=failure.message,
        fault=failure.fault.value,
        retryable=failure.retryable,
    )


def _rounded(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s, 3)


def _in_order(handoffs: list[Handoff]) -> Iterator[Handoff]:
    """Sort those that were opened in one instant; all others stand in order."""
    for _, same in groupby(handoffs, attrgetter("opened_at_s")):
        yield from sorted(same, key=attrgetter("room"))


def _written(where: Place) -> str:
    """Write a place down, exactly."""
    return _PLACE.pack(*where).hex()


def read_place(text: str) -> Place:
    """Read a place that was written down.

    Raises:
        ValueError: it is none.

    """
    try:
        at_s, room = _PLACE.unpack(bytes.fromhex(text))
    except struct.error as error:
        raise ValueError(text) from error
    return at_s, room
