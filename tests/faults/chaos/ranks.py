"""A rank of the storm: the client's real conversation, on sockets in the test's own loop.

It does what the client's I/O thread does, on virtual time, over a line that loses, doubles and
delays broadcasts. Its process may die; its coordinator may.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import zmq

from coordinator.channel import Channel
from coordinator.client.conversation import Conversation
from coordinator.client.settings import ClientSettings
from coordinator.client.standing import RankState
from coordinator.messages import decode_broadcast, decode_to_rank, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from coordinator.client.inbox import Head
    from coordinator.messages import Event, Hello, Item
    from tests.service.stage import Stage
    from tests.support.faults.weather import Weather

#: The least time between two turns of a rank that has something to do.
_TURN_S: Final = 0.001


class StormRank:
    """One life of one rank.

    Attributes:
        applied: what its engine has drained, by number.
        weather: what becomes of the broadcasts to it.
        alive: its process runs.
        frozen: its process stands still.
        ready: it has seen its whole group hear a coordinator; its engine waits for that once.

    """

    def __init__(self, hello: Hello, random: Random, storm: Weather[list[bytes]]) -> None:
        self.hello = hello
        self.name = f"{hello.group}/{hello.rank}"
        self.applied: dict[int, Event] = {}
        self.weather = storm
        self.alive = True
        self.frozen = False
        self.ready = False
        self._unread: list[tuple[Callable[[list[bytes]], None], list[bytes]]] = []
        self.conversation = Conversation(
            hello, "the storm's", ClientSettings(), asyncio.get_running_loop().time()
        )
        self._identity = b"r" + random.randbytes(15)
        self._stage: Stage | None = None
        self._control: Channel | None = None
        self._outcomes: Channel | None = None
        self._opened = ("", 0)
        self._timer: asyncio.TimerHandle | None = None
        self.conversation.blocked(asyncio.get_running_loop().time())

    # --- its life ----------------------------------------------------------------------------

    def connect(self, stage: Stage) -> None:
        """A coordinator is there, and ZeroMQ has found it."""
        if not self.alive:
            return
        self._stage = stage
        self._open_control()
        self._open_outcomes()
        self.pump()

    def disconnect(self) -> None:
        """The line, or the coordinator, is gone; nobody tells the rank but its socket."""
        self._stage = None
        self._close_sockets()
        self.pump()

    def freeze(self) -> None:
        """SIGSTOP: what arrives is not read."""
        self.frozen = True
        if self._timer is not None:
            self._timer.cancel()

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        unread, self._unread = self._unread, []
        for take, frames in unread:
            take(frames)
        self.pump()

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._close_sockets()
        if self._timer is not None:
            self._timer.cancel()

    # --- its engine --------------------------------------------------------------------------

    @property
    def joining(self) -> bool:
        """Whether it has not applied anything yet; then others may be ahead of it."""
        return not self.applied

    def say(self, item: Item) -> None:
        """Have the conversation say something."""
        self.conversation.say(item, 64)
        self.pump()

    def drain(self, head: Head) -> list[Event]:
        """Apply everything up to ``head``."""
        inbox = self.conversation.inbox
        before = inbox.drained
        events = self.conversation.drain(head)
        self.applied |= dict(enumerate(events, before + 1))
        return events

    # --- what the I/O thread does ------------------------------------------------------------

    def pump(self) -> None:
        """Say what is due, and see to be woken when there is more."""
        if not self.alive or self.frozen:
            return
        now_s = asyncio.get_running_loop().time()
        talk = self.conversation
        talk.tick(now_s)
        self._follow()
        while (message := talk.next_message(now_s)) is not None:
            if self._control is None or not self._control.send([encode(message)]):
                talk.blocked(now_s)
        self.ready = self.ready or talk.standing.state is RankState.READY
        self._arm(now_s)

    def _arm(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.conversation.due_s()
        if due_s != float("inf"):
            at_s = max(due_s, now_s + _TURN_S)
            self._timer = asyncio.get_running_loop().call_at(at_s, self.pump)

    def _follow(self) -> None:
        wanted = (self.conversation.outcomes, self.conversation.connections)
        if wanted == self._opened:
            return
        reconnects = wanted[1] != self._opened[1]
        self._opened = wanted
        if reconnects:
            self._open_control()
        self._open_outcomes()

    def _open_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._stage is None:
            return
        socket = self._stage.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, self._identity)
        socket.connect(self._stage.config.listen.control[0])
        self._control = Channel(socket, self._hear)
        self._control.start()
        self.conversation.unblocked()

    def _open_outcomes(self) -> None:
        if self._outcomes is not None:
            self._outcomes.close()
            self._outcomes = None
        # The address in the Welcome is the same for every coordinator; which one is there is ours to know.
        if self._stage is None or not self.conversation.outcomes:
            return
        socket = self._stage.context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, self.hello.group.encode() + b"\0")
        socket.connect(self._stage.config.listen.outcomes[0])
        self._outcomes = Channel(socket, self._hear_broadcast)
        self._outcomes.start()

    def _close_sockets(self) -> None:
        for channel in (self._control, self._outcomes):
            if channel is not None:
                channel.close()
        self._control = self._outcomes = None

    def _hear(self, frames: list[bytes]) -> None:
        if self.frozen:
            self._unread.append((self._hear, frames))
            return
        self.conversation.hear(decode_to_rank(frames[0]), asyncio.get_running_loop().time())
        self.pump()

    def _hear_broadcast(self, frames: list[bytes]) -> None:
        if self.frozen:
            self._unread.append((self._hear_broadcast, frames))
            return
        for arrived in self.weather.let_through(frames):
            now_s = asyncio.get_running_loop().time()
            self.conversation.hear_broadcast(decode_broadcast(arrived[1]), now_s)
        self.pump()
