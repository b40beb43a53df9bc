"""A coordinator, its ranks and a bad network, all in one thread, with a clock that nobody waits for.

Broadcasts are lost, doubled and shuffled. Control connections are in order, but can be cut with
everything that is under way in them. The coordinator can be replaced by one that knows nothing.
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
    listening: bool = False


@dataclass
class Line:
    """A rank and its connection."""

    rank: int
    conversation: Conversation
    up: deque[Hello | Submit] = field(default_factory=deque)
    down: deque[ToRank] = field(default_factory=deque)
    said: int = 0
    drained: dict[int, list[Event]] = field(default_factory=dict)

    def drain(self, through: Head | None) -> None:
        """Drain, and note the events under the epoch that they carry as their room."""
        for event in self.conversation.drain(through):
            self.drained.setdefault(event.attempt, []).append(event)


class World:
    """Everything. The events of epoch ``e`` have the rooms 1, 2, 3 ... and ``e`` as their attempt."""

    def __init__(self, random: Random, ranks: int) -> None:
        self.random = random
        self.now_s = 0.0
        self.epoch = 1
        self.log: list[Event] = []
        self.logs: dict[int, list[Event]] = {1: self.log}
        self.known: dict[int, Known] = {}
        self.heard: dict[int, list[Item]] = {rank: [] for rank in range(ranks)}
        self.published = 0
        self.air: list[tuple[int, Broadcast]] = []
        self.lines = [Line(rank, self._conversation(rank, ranks)) for rank in range(ranks)]

    def step(self) -> None:
        """Let something happen."""
        actions = {
            self.publish: 6,
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
            self.broadcast()
            while self.air:
                self.receive(keep=False)
            self.check()
            if all(self._settled(line) for line in self.lines):
                return
        problem = [(vars(line.conversation), line.conversation.inbox.have) for line in self.lines]
        raise AssertionError(problem)

    # --- what can happen ---------------------------------------------------------------------

    def publish(self) -> None:
        self.log.append(Outcome(len(self.log) + 1, self.epoch))

    def say(self) -> None:
        line = self.random.choice(self.lines)
        line.said += 1
        turn, after = line.conversation.inbox.drained
        line.conversation.say(turn, Open(line.said, after), 1)

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
            line.down.extend(self._answer(line.rank, line.up.popleft()))
        if line.down:
            line.conversation.hear(line.down.popleft(), self.now_s)

    def broadcast(self) -> None:
        """Tell everybody what is new; without that it is a heartbeat."""
        new = self.log[self.published :]
        ranks = range(len(self.lines))
        message = Broadcast(
            self.epoch,
            self.published + 1,
            self._stable(),
            [self.known[rank].received if rank in self.known else 0 for rank in ranks],
            len(self.known) == len(ranks) and all(known.listening for known in self.known.values()),
            new,
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
        line = self.random.choice(self.lines)
        line.up.clear()
        line.down.clear()
        line.conversation.blocked(self.now_s)
        line.conversation.unblocked()

    def replace(self) -> None:
        """Have a new coordinator, which knows nothing."""
        self.epoch += 1
        self.log = self.logs[self.epoch] = []
        self.known.clear()
        self.published = 0

    # --- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold at any time."""
        head = Head.unpack(self.lines[0].conversation.inbox.token)
        for line in self.lines:
            assert line.conversation.inbox.reaches(head), "rank 0's head makes another rank wait"
            for epoch, events in line.drained.items():
                assert events == self.logs[epoch][: len(events)]
            known = self.known.get(line.rank)
            assert known is None or known.acknowledged <= line.conversation.inbox.have

    def _settled(self, line: Line) -> bool:
        inbox = line.conversation.inbox
        everything = (self.epoch, len(self.log))
        return (
            (inbox.epoch, inbox.have) == everything
            and Head.unpack(inbox.token) == everything
            and not len(line.conversation.outbox)
        )

    # --- the coordinator ---------------------------------------------------------------------

    def _answer(self, rank: int, message: Hello | Submit) -> list[ToRank]:
        match message:
            case Hello():
                known = self.known.setdefault(rank, Known(message.confirmed))
                have = message.acknowledged if message.epoch == self.epoch else 0
                events = self.log[have : self.published]
                return [
                    Welcome(self.epoch, "somewhere", have + 1, events, self._stable(), known.received, 1.0)
                ]
            case Submit():
                return self._submitted(rank, message)

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
            assert item.after <= submit.applied, "a number of another epoch"
            known.received += 1
            self.heard[rank].append(item)
        return []

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
