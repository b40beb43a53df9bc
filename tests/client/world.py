"""A coordinator, its ranks and a bad network, all in one thread, with a clock that nobody waits for.

Broadcasts are lost, doubled and shuffled. Control connections are in order, but can be cut with
everything that is under way in them. The coordinator can be replaced by one that knows only what
its ranks remember.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.client.conversation import Conversation
from coordinator.client.inbox import Head
from coordinator.client.settings import ClientSettings
from coordinator.messages import (
    VERSION,
    Broadcast,
    Event,
    Hello,
    Item,
    Open,
    Outcome,
    Pool,
    Process,
    Released,
    Resend,
    Role,
    Submit,
    Welcome,
    WhoAreYou,
)
from tests.client.peer import LAYOUT

if TYPE_CHECKING:
    from random import Random

    from coordinator.messages import ToRank

STEP_S = 0.05


@dataclass
class Known:
    """A rank, as the coordinator knows it."""

    received: int
    acknowledged: int = 0
    applied: int = 0
    listening: bool = False


@dataclass
class Line:
    """A rank and its connection."""

    rank: int
    conversation: Conversation
    up: deque[Hello | Submit] = field(default_factory=deque)
    down: deque[ToRank] = field(default_factory=deque)
    said: set[int] = field(default_factory=set)
    drained: list[Event] = field(default_factory=list)

    def drain(self, through: Head | None) -> None:
        """Drain, as an engine does."""
        self.drained += self.conversation.drain(through)


class World:
    """Everything. Each rank speaks of each of the rooms 1, 2, 3 ... at most once."""

    def __init__(self, random: Random, ranks: int) -> None:
        self.random = random
        self.now_s = 0.0
        self.epoch = 1
        self.log: list[Event] = []
        self.active: set[int] = set()
        self.ended: dict[int, int] = {}
        self.known: dict[int, Known] = {}
        self.veterans: dict[int, Hello] | None = None
        self.published = 0
        self.air: list[tuple[int, Broadcast]] = []
        self.lines = [Line(rank, self._conversation(rank, ranks)) for rank in range(ranks)]

    def step(self) -> None:
        """Let something happen."""
        actions = {
            self.conclude: 6,
            self.say: 6,
            self.talk: 20,
            self.carry: 20,
            self.broadcast: 10,
            self.receive: 20,
            self.lose: 4,
            self.drain: 10,
            self.cut: 1,
            self.replace: 0.3,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()
        self.check()

    def settle(self) -> None:
        """Let the network be good, until everybody has everything; that must not take long."""
        for _ in range(400):
            for line in self.lines:
                self.talk(line)
                while line.up or line.down:
                    self.carry(line)
            while self.active:
                self.conclude()
            self.broadcast()
            while self.air:
                self.receive(keep=False)
            self.check()
            if all(self._settled(line) for line in self.lines):
                return
        problem = [
            (line.conversation.standing.explain(), line.conversation.inbox.have) for line in self.lines
        ]
        raise AssertionError(problem)

    # --- what can happen ---------------------------------------------------------------------

    def conclude(self) -> None:
        """Give a verdict."""
        if self.active:
            room = self.random.choice(sorted(self.active))
            self.active.remove(room)
            self.log += [Outcome(room, 1), Released(room, 1)]
            self.ended[room] = len(self.log) - 1

    def say(self) -> None:
        """Let a rank speak of a room, unless its engine knows that it is over."""
        line = self.random.choice(self.lines)
        over = {event.room for event in line.drained}
        room = self.random.randint(1, max(line.said | over, default=0) + 1)
        if room not in line.said | over:
            line.said.add(room)
            line.conversation.say(Open(room, line.conversation.inbox.drained), 1)

    def talk(self, line: Line | None = None) -> None:
        """Let time pass, and a rank say what it has to."""
        self.now_s += STEP_S
        line = line or self.random.choice(self.lines)
        line.conversation.tick(self.now_s)
        while message := line.conversation.next_message(self.now_s):
            line.up.append(message)

    def carry(self, line: Line | None = None) -> None:
        """Take one message over a control connection, each way."""
        line = line or self.random.choice(self.lines)
        if line.up:
            self._answer(line, line.up.popleft())
        if line.down:
            line.conversation.hear(line.down.popleft(), self.now_s)

    def broadcast(self) -> None:
        """Tell everybody what is new; without that it is a heartbeat."""
        if self.veterans is not None:
            return
        ranks = range(len(self.lines))
        message = Broadcast(
            self.epoch,
            self.published + 1,
            self._stable(),
            [self.known[rank].received if rank in self.known else 0 for rank in ranks],
            [rank for rank in ranks if rank not in self.known or not self.known[rank].listening],
            self.log[self.published :],
        )
        self.published = len(self.log)
        # Who has not subscribed yet hears nothing.
        self.air += [(line.rank, message) for line in self.lines if line.conversation.outcomes]

    def receive(self, *, keep: bool | None = None) -> None:
        """Deliver any broadcast, and perhaps once more later."""
        if self.air:
            index = self.random.randrange(len(self.air))
            is_doubled = self.random.random() < 0.1 if keep is None else keep
            rank, message = self.air[index] if is_doubled else self.air.pop(index)
            self.lines[rank].conversation.hear_broadcast(message, self.now_s)

    def lose(self) -> None:
        """Lose a broadcast."""
        if self.air:
            self.air.pop(self.random.randrange(len(self.air)))

    def drain(self) -> None:
        """Let one rank drain all, or every rank through rank 0's head."""
        if self.random.random() < 0.3:
            self.random.choice(self.lines).drain(None)
            return
        head = Head.unpack(self.lines[0].conversation.inbox.token)
        for line in self.lines:
            line.drain(head)

    def cut(self) -> None:
        """Cut a control connection; the next one is there at once."""
        line = self.random.choice(self.lines)
        line.up.clear()
        line.down.clear()
        line.conversation.blocked(self.now_s)
        line.conversation.unblocked()

    def replace(self) -> None:
        """Have a new coordinator, once all ranks have joined the present one."""
        if len(self.known) == len(self.lines):
            self.epoch += 1
            self.known.clear()
            self.active.clear()
            self.veterans = {}

    # --- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold at any time."""
        head = Head.unpack(self.lines[0].conversation.inbox.token)
        longest = max((line.drained for line in self.lines), key=len)
        for line in self.lines:
            assert line.conversation.inbox.reaches(head), "rank 0's head makes another rank wait"
            assert line.drained == longest[: len(line.drained)], "ranks disagree"

    def _settled(self, line: Line) -> bool:
        inbox = line.conversation.inbox
        everything = (self.epoch, len(self.log))
        return (
            (inbox.epoch, inbox.have) == everything
            and Head.unpack(inbox.token) == everything
            and not len(line.conversation.outbox)
        )

    # --- the coordinator ---------------------------------------------------------------------

    def _answer(self, line: Line, message: Hello | Submit) -> None:
        if isinstance(message, Submit):
            line.down.extend(self._submitted(line.rank, message))
        elif message.epoch in {0, self.epoch} and self.veterans is None:
            self.known.setdefault(line.rank, Known(message.confirmed))
            self._welcome(line, message)
        elif message.memory is None:
            line.down.append(WhoAreYou(self.epoch))
        elif self.veterans is None:
            # Said once more while the others were waited for.
            self._welcome(line, message)
        else:
            self.veterans[line.rank] = message
            if len(self.veterans) == len(self.lines):
                self._restore(self.veterans)

    def _welcome(self, line: Line, hello: Hello) -> None:
        have = min(hello.acknowledged, len(self.log))
        events = self.log[have : self.published]
        received = self.known[line.rank].received
        line.down.append(Welcome(self.epoch, "there", have + 1, events, self._stable(), received, 1.0))

    def _restore(self, veterans: dict[int, Hello]) -> None:
        """Go on from what the ranks remember; fail what has no verdict."""
        self.veterans = None
        most = max(veterans.values(), key=lambda hello: hello.acknowledged)
        assert most.memory is not None
        assert len(most.memory.events) == most.acknowledged
        self.log = list(most.memory.events)
        self.published = len(self.log)
        self.ended = {
            event.room: number for number, event in enumerate(self.log, 1) if isinstance(event, Outcome)
        }
        for rank, hello in veterans.items():
            assert hello.memory is not None
            self.active |= {
                held.room for held in hello.memory.held if self.ended.get(held.room, 0) <= held.after
            }
            self.known[rank] = Known(hello.confirmed, hello.acknowledged)
        for rank, hello in veterans.items():
            self._welcome(self.lines[rank], hello)
        while self.active:
            self.conclude()

    def _submitted(self, rank: int, submit: Submit) -> list[ToRank]:
        known = self.known.get(rank)
        if known is None or submit.epoch != self.epoch:
            return [WhoAreYou(self.epoch)]
        assert submit.applied <= submit.acknowledged <= len(self.log)
        known.acknowledged = max(known.acknowledged, submit.acknowledged)
        known.listening = submit.listening
        if submit.first > known.received + 1:
            return [Resend(known.received)] if submit.items else []
        for item in submit.items[known.received + 1 - submit.first :]:
            assert item.after >= known.applied, "said before what counts as drained"
            known.received += 1
            self._said(item)
        known.applied = max(known.applied, submit.applied)
        return []

    def _said(self, item: Item) -> None:
        if self.ended.get(item.room, 0) <= item.after:
            self.active.add(item.room)

    def _stable(self) -> int:
        if len(self.known) < len(self.lines):
            return 0
        return min(known.acknowledged for known in self.known.values())

    def _conversation(self, rank: int, ranks: int) -> Conversation:
        hello = Hello(
            version=VERSION,
            role=Role.PREFILL,
            group="g",
            rank=rank,
            world_size=ranks,
            instance=rank,
            process=Process(1, "", 0),
            backend="",
            layout=LAYOUT,
            pool=Pool("", 1, 1),
            endpoint=b"",
        )
        return Conversation(hello, "nowhere", ClientSettings(), self.now_s)
