"""Ranks of one engine in lockstep, and coordinators that stay away, come back, or were there all along.

All in one thread, with a clock that nobody waits for. Broadcasts are lost, and reach each rank at
their own time; what a rank says is under way until the coordinator takes it, also for long. The engine is
as strict as one can be: an outcome is for a room in flight, a release for an attempt that has ended, and
after each step all ranks have applied the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from coordinator.client.inbox import NO_EPOCH
from coordinator.client.lives import Lives
from coordinator.client.settings import ClientSettings
from coordinator.client.token import Token
from coordinator.messages import (
    VERSION,
    Broadcast,
    Event,
    Hello,
    Open,
    Outcome,
    Pool,
    Process,
    Refused,
    Released,
    Resend,
    Role,
    Submit,
    Welcome,
    WhoAreYou,
)
from coordinator.reasons import Failure, Reason
from tests.client.peer import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from coordinator.messages import ToRank

T = TypeVar("T")
LOST_S = 60.0
#: The coordinator's patience with a silent rank.
SILENT_S = 15.0


@dataclass
class Engine:
    """What one rank's engine has applied, and what it waits for."""

    applied: list[Event] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    held: set[tuple[int, int]] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Apply an event, which must make sense."""
        self.applied.append(event)
        if isinstance(event, Outcome):
            assert event.room in self.in_flight, f"an outcome for nothing: {event}"
            self.in_flight.remove(event.room)
            assert (event.room, event.attempt) not in self.held, f"that attempt's pages are held: {event}"
            self.held.add((event.room, event.attempt))
        else:
            assert (event.room, event.attempt) in self.held, f"a release for nothing: {event}"
            self.held.remove((event.room, event.attempt))


@dataclass
class Member:
    """A rank, as the coordinator knows it."""

    hello: Hello
    acknowledged: int
    received: int
    seen_at_s: float
    listening: bool = False
    alive: bool = True


class Coordinator:
    """One incarnation: what of the real one matters here."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.begin_anew(0)
        self.veterans: dict[int, Hello] = {}
        self.attempts: dict[int, int] = {}

    def begin_anew(self, life: int) -> None:
        """Have an empty group."""
        self.life = life
        self.members: dict[int, Member] = {}
        self.log: list[Event] = []
        self.active: set[int] = set()
        self.ended: dict[int, int] = {}
        self.published = 0

    def hear(self, rank: int, message: Hello | Submit, instance: int) -> list[ToRank]:
        """Take a message of a rank's life."""
        if isinstance(message, Submit):
            return self.submitted(rank, message, instance)
        life = max([self.life, *(hello.life for hello in self.veterans.values())])
        if message.life < life:
            return [Refused("outlived", "of a former life", life=life)]
        if message.life > self.life:
            for member in self.members.values():
                self.lose(member)
            self.begin_anew(message.life)
            self.veterans.clear()
        holder = self.members.get(rank)
        if holder is not None and holder.hello.instance == message.instance:
            holder.alive, holder.seen_at_s = True, self.world.now_s
            if message.epoch == self.epoch:
                holder.acknowledged = max(holder.acknowledged, message.acknowledged)
            return [self.welcome(holder)]
        if message.epoch == NO_EPOCH and not self.awaits():
            have = 0 if holder is None else self.stable()
            return [self.welcome(self.place(rank, message, have))]
        if message.epoch != NO_EPOCH and message.memory is None:
            return [WhoAreYou(self.epoch)]
        self.veterans[rank] = message
        return self.restored() if len(self.veterans) == self.world.size else []

    def awaits(self) -> bool:
        """Whether ranks are to come that remember a former coordinator."""
        epochs = {line.lives.inbox.epoch for line in self.world.lines}
        return bool(epochs - {NO_EPOCH, self.epoch})

    def place(self, rank: int, hello: Hello, have: int) -> Member:
        """Give a rank its place."""
        member = self.members[rank] = Member(hello, have, hello.confirmed, self.world.now_s)
        return member

    def restored(self) -> list[ToRank]:
        """Go on from what the ranks remember; each hears of it when it asks again."""
        most = max(self.veterans.values(), key=lambda hello: (hello.memory is not None, hello.acknowledged))
        self.log = list(most.memory.events) if most.memory is not None else []
        assert len(self.log) == most.acknowledged
        self.published = len(self.log)
        for number, event in enumerate(self.log, 1):
            if isinstance(event, Outcome):
                self.ended[event.room] = number
                self.attempts[event.room] = max(self.attempts.get(event.room, 0), event.attempt)
        for rank, hello in self.veterans.items():
            self.place(rank, hello, hello.acknowledged)
            for held in hello.memory.held if hello.memory is not None else ():
                self.attempts[held.room] = max(self.attempts.get(held.room, 0), held.attempt)
                if self.ended.get(held.room, 0) <= held.after:
                    self.active.add(held.room)
        self.fail(Reason.COORDINATOR_RESTARTED)
        self.veterans.clear()
        return []

    def submitted(self, rank: int, submit: Submit, instance: int) -> list[ToRank]:
        """Take a rank's items."""
        member = self.members.get(rank)
        if (
            member is None
            or member.hello.instance != instance
            or not member.alive
            or submit.epoch != self.epoch
        ):
            return [WhoAreYou(self.epoch)]
        assert submit.applied <= submit.acknowledged <= len(self.log)
        member.seen_at_s = self.world.now_s
        member.acknowledged = max(member.acknowledged, submit.acknowledged)
        member.listening = submit.listening
        if submit.first > member.received + 1:
            return [Resend(member.received)]
        for item in submit.items[member.received + 1 - submit.first :]:
            member.received += 1
            if self.ended.get(item.room, 0) <= item.after:
                self.active.add(item.room)
        return []

    def conclude(self, room: int, failure: Failure | None = None) -> None:
        """Give a verdict, and perhaps release the pages."""
        self.active.discard(room)
        attempt = self.attempts[room] = self.attempts.get(room, 0) + 1
        self.log.append(Outcome(room, attempt, failure))
        self.ended[room] = len(self.log)
        if self.world.random.random() < 0.7:
            self.log.append(Released(room, attempt))

    def fail(self, reason: Reason) -> None:
        """Fail everything."""
        for room in sorted(self.active):
            self.conclude(room, Failure(reason, "", ""))

    def lose(self, member: Member) -> None:
        """Lose a member, and fail its group's rooms."""
        if member.alive:
            member.alive = False
            self.fail(Reason.RANK_LOST)

    def stable(self) -> int:
        """Up to where every live rank has the events."""
        live = [member for member in self.members.values() if member.alive]
        return min((member.acknowledged for member in live), default=0)

    def broadcast(self) -> Broadcast:
        """What all ranks are told now."""
        for member in self.members.values():
            if self.world.now_s - member.seen_at_s > SILENT_S:
                self.lose(member)
        ranks = range(self.world.size)
        missing = [
            rank
            for rank in ranks
            if rank not in self.members or not (self.members[rank].alive and self.members[rank].listening)
        ]
        received = [self.members[rank].received if rank in self.members else 0 for rank in ranks]
        first, events = self.published + 1, self.log[self.published :]
        self.published = len(self.log)
        return Broadcast(self.epoch, first, self.stable(), received, missing, events)

    def welcome(self, member: Member) -> Welcome:
        """Answer a hello."""
        have = member.acknowledged
        events = self.log[have : self.published]
        return Welcome(self.epoch, "there", have + 1, events, self.stable(), member.received, 1.0)


@dataclass
class Line:
    """A rank and its connection, which belongs to one of its lives."""

    lives: Lives
    engine: Engine = field(default_factory=Engine)
    cut: bool = False
    #: With the instance that said it.
    up: deque[tuple[int, Hello | Submit]] = field(default_factory=deque)
    broadcasts: deque[tuple[int, Broadcast]] = field(default_factory=deque)

    @property
    def instance(self) -> int:
        return self.lives.conversation.hello.instance


class World:
    """Everything."""

    def __init__(self, random: Random, size: int) -> None:
        self.random = random
        self.size = size
        self.now_s = 0.0
        self.coordinator: Coordinator | None = Coordinator(self, 1)
        #: Cut off with all that was on its way to it; it may be heard of again.
        self.absent: Coordinator | None = None
        self.epochs = 1
        self.losses = 0
        self.lines = [
            Line(Lives(self._hello(rank), "nowhere", self._settings(), 0.0)) for rank in range(size)
        ]

    # --- the network and the coordinator -----------------------------------------------------

    def turn(self, seconds: float = 0.3) -> None:
        """Let time pass, and everything happen that happens by itself."""
        self.now_s += seconds
        for rank, line in enumerate(self.lines):
            self._talk(rank, line)
        coordinator = self.coordinator
        if coordinator is None:
            return
        for room in sorted(coordinator.active):
            if self.random.random() < 0.3:
                coordinator.conclude(room)
        message = coordinator.broadcast()
        for line in self.lines:
            if not line.cut and line.lives.conversation.outcomes and self.random.random() < 0.8:
                line.broadcasts.append((line.instance, message))

    def _talk(self, rank: int, line: Line) -> None:
        lives = line.lives
        lives.tick(self.now_s)
        while message := lives.next_message(self.now_s):
            if not line.cut:
                line.up.append((line.instance, message))
        if self.coordinator is not None and not line.cut:
            for instance, said in self._some(line.up):
                for answer in self.coordinator.hear(rank, said, instance):
                    # An answer to a former life finds nobody.
                    if instance == line.instance:
                        lives.hear(answer, self.now_s)
        while line.broadcasts and self.random.random() < 0.7:
            instance, broadcast = line.broadcasts.popleft()
            if instance == line.instance:
                lives.hear_broadcast(broadcast, self.now_s)

    def _some(self, messages: deque[T]) -> Iterator[T]:
        """Take some of them, one at least: a rank that is there is never taken for dead."""
        more = True
        while messages and more:
            yield messages.popleft()
            more = self.random.random() < 0.8

    def calm(self) -> None:
        """Let ranks come back. One that the coordinator had lost by silence is behind until it does."""
        for _ in range(10):
            self.turn()

    def leave(self) -> None:
        """The coordinator is gone, dead or cut off."""
        if self.coordinator is not None:
            self.coordinator, self.absent = None, self.coordinator

    def return_(self, *, same: bool) -> None:
        """It is back, as it was or as a new one. What was said meanwhile is lost or arrives late."""
        if self.coordinator is None:
            if same and self.absent is not None:
                self.coordinator = self.absent
            else:
                self.epochs += 1
                self.coordinator = Coordinator(self, self.epochs)
            self.absent = None
            for line in self.lines:
                if not same or self.random.random() < 0.5:
                    line.up.clear()

    def away(self, seconds: float) -> None:
        """Let it stay away for so long, with steps of the engine now and then."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.turn(self.random.uniform(0.5, 4.0))
            if self.random.random() < 0.5:
                self.step()

    # --- the engine --------------------------------------------------------------------------

    def step(self, tokens: int = 1) -> None:
        """Let all ranks make a step. With more ``tokens`` rank 0 has read them before it drains."""
        for token in [self.lines[0].lives.head() for _ in range(tokens)]:
            self.losses += Token.unpack(token).lost
            for line in self.lines:
                self._drain(line, Token.unpack(token))
        self.check()
        room = self.random.randint(1, 12)
        if self.random.random() < 0.6 and room not in self.lines[0].engine.in_flight:
            for line in self.lines:
                line.lives.say(Open(room, line.lives.inbox.drained), 1, line.lives.inbox)
                line.engine.in_flight.add(room)

    def _drain(self, line: Line, token: Token) -> None:
        for _ in range(200):
            if line.lives.reaches(token):
                break
            # A rank that joins anew lets the others wait, for as long as that takes.
            self.turn()
            if line.lives.unproven:
                line.lives.proven(self.now_s)
        assert line.lives.reaches(token), f"{token} is out of reach: {line.lives.behind(token, 0)}"
        for event in line.lives.drain(token, self.now_s):
            line.engine.apply(event)
        if line.lives.unproven and self.random.random() < 0.5:
            line.lives.proven(self.now_s)

    def prove(self) -> None:
        """Let every rank have its proof."""
        for line in self.lines:
            if line.lives.unproven:
                line.lives.proven(self.now_s)

    def check(self) -> None:
        """All ranks are alike."""
        first = self.lines[0].engine
        for line in self.lines:
            assert line.engine == first

    def settle(self) -> None:
        """Let all be well, and nothing be left over."""
        self.return_(same=False)
        for line in self.lines:
            line.cut = False
        for _ in range(600):
            self.turn()
            self.prove()
            self.drain_only()
            if not any(line.engine.in_flight or line.lives.unreleased for line in self.lines):
                return
        message = f"left over: {[line.lives.conversation.standing.explain() for line in self.lines]}"
        raise AssertionError(message)

    def drain_only(self) -> None:
        """A step in which the engine says nothing."""
        token = Token.unpack(self.lines[0].lives.head())
        for line in self.lines:
            self._drain(line, token)
        self.check()

    # --- how ranks are made ------------------------------------------------------------------

    def _hello(self, rank: int) -> Hello:
        return Hello(
            version=VERSION,
            role=Role.PREFILL,
            group="g",
            rank=rank,
            world_size=self.size,
            instance=rank + 1,
            process=Process(1, "", 0),
            backend="",
            layout=LAYOUT,
            pool=Pool("", 1, 1),
            endpoint=b"",
        )

    @staticmethod
    def _settings() -> ClientSettings:
        return replace(ClientSettings(), coordinator_lost_s=LOST_S)
