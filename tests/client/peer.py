"""A small real coordinator for the client's tests: a ROUTER and an XPUB that speak the protocol.

It decides nothing. A test tells it what to publish, reads what ranks have said, and can have it
lose broadcasts, refuse, forget its members, or go away and come back in a new epoch.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import zmq

from coordinator.errors import ProtocolError
from coordinator.layout import Layout
from coordinator.messages import (
    Broadcast,
    Bye,
    Event,
    Hello,
    Item,
    Outcome,
    Refused,
    Resend,
    Submit,
    Welcome,
    WhoAreYou,
    WorkerOrders,
    decode_from_peer,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from coordinator.client.rank import Rank

LAYOUT = Layout(layers=2, page_tokens=4, kv_heads=4, head_size=8, dtype="float16")
HEARTBEAT_S = 0.05


def outcomes(rooms: Sequence[int]) -> list[Outcome]:
    return [Outcome(room, 1) for room in rooms]


def drain_until(rank: Rank, count: int) -> list[Event]:
    """Drain until there are ``count`` events, or more."""
    events: list[Event] = []
    deadline_s = time.monotonic() + 10
    while len(events) < count:
        assert rank.wait(deadline_s - time.monotonic()), f"only {len(events)} of {count} events came"
        events += rank.drain()
    return events


@dataclass
class Member:
    """A rank, as the peer knows it."""

    identity: bytes
    hello: Hello
    acknowledged: int = 0
    applied: int = 0
    received: int = 0
    listening: bool = False


@dataclass
class Group:
    """The log of a group."""

    name: str
    world_size: int
    life: int = 0
    events: list[Event] = field(default_factory=list)
    published: int = 0
    beaten_at_s: float = 0.0
    members: dict[int, Member] = field(default_factory=dict)
    items: dict[int, list[Item]] = field(default_factory=dict)


class Peer:
    """Runs in a thread of its own from ``start`` (or ``with``) to ``stop``.

    Attributes:
        drop: asked for each broadcast; true loses it.
        refusal: the answer to every Hello, if set.
        hellos, submits, byes: what was heard.
        max_welcome: a Welcome brings at most so many events.
        heartbeat_s: how often ranks are asked to give a sign of life.
        worker: what ranks are to run themselves, if anything; what it says is not heard.

    """

    def __init__(self, directory: Path, epoch: int = 7, *, outcomes: str | None = None) -> None:
        self.control = f"ipc://{directory}/control"
        self.outcomes = f"ipc://{directory}/outcomes"
        self.advertised = outcomes or self.outcomes
        self.epoch = epoch
        self.drop: Callable[[Broadcast], bool] = lambda _: False
        self.refusal: Refused | None = None
        self.deaf = False
        self.max_welcome = 1 << 20
        self.heartbeat_s = HEARTBEAT_S
        self.worker: WorkerOrders | None = None
        self.hellos: list[Hello] = []
        self.submits: list[Submit] = []
        self.byes = 0
        self.malformed = 0
        self.groups: dict[str, Group] = {}
        self._known: dict[bytes, Member] = {}
        self._orders: deque[Callable[[], object]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = False
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Bind and begin to listen."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._xpub = self._context.socket(zmq.XPUB)
        for socket, address in ((self._router, self.control), (self._xpub, self.outcomes)):
            socket.linger = 0
            socket.bind(address)
        self._running = True
        self._thread = threading.Thread(target=self._run, name="peer")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Go away without a word."""
        if self._thread is not None:
            self._running = False
            self._tell(lambda: None)
            self._thread.join()
            self._thread = None

    def restart(self, epoch: int) -> None:
        """Come back on the same addresses, knowing nothing."""
        self.stop()
        self.epoch = epoch
        self.groups.clear()
        self._known.clear()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        os.close(self._wake)

    def publish(self, group: str, *events: Event) -> None:
        """Append events to a group's log and broadcast them."""
        self._tell(lambda: self._publish(group, events))

    def say(self, group: str, rank: int, message: Refused | WhoAreYou | Resend) -> None:
        """Say something to one rank."""
        self._tell(lambda: self._say(self.groups[group].members[rank].identity, encode(message)))

    def say_bytes(self, group: str, rank: int, frames: list[bytes]) -> None:
        """Say anything to one rank."""
        member = self.groups[group].members[rank]
        self._tell(lambda: self._send(self._router, [member.identity, *frames]))

    def broadcast_bytes(self, frames: list[bytes]) -> None:
        """Broadcast anything."""
        self._tell(lambda: self._send(self._xpub, frames))

    def call(self, order: Callable[[], object]) -> None:
        """Have its thread do something; it does nothing else meanwhile."""
        self._tell(order)

    def forget(self) -> None:
        """Lose all members, in the same epoch; what they have said stays known."""
        self._tell(self._known.clear)

    def items(self, group: str, rank: int = 0) -> list[Item]:
        """Everything that a rank has said, in order."""
        return self.groups[group].items.get(rank, []) if group in self.groups else []

    def acknowledged(self, group: str, rank: int = 0) -> int:
        """Up to where a rank says that it has the events."""
        return self.groups[group].members[rank].acknowledged

    # --- the thread --------------------------------------------------------------------------

    def _tell(self, order: Callable[[], object]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._xpub, self._wake):
            poller.register(source, zmq.POLLIN)
        while self._running:
            ready = dict(poller.poll(round(HEARTBEAT_S * 500)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._orders:
                self._orders.popleft()()
            if self._xpub in ready:
                self._xpub.recv()
            if self._router in ready and not self.deaf:
                identity, *frames = self._router.recv_multipart()
                self._heard(identity, frames)
            for group in list(self.groups.values()):
                if time.monotonic() - group.beaten_at_s > HEARTBEAT_S:
                    self._beat(group)
        self._router.close()
        self._xpub.close()
        self._context.term()

    def _heard(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            (frame,) = frames
            message = decode_from_peer(frame)
        except (ProtocolError, ValueError):
            self.malformed += 1
            return
        match message:
            case Hello():
                self.hellos.append(message)
                self._hello(identity, message)
            case Submit():
                self.submits.append(message)
                self._submit(identity, message)
            case Bye():
                self.byes += 1

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if self.refusal is not None:
            self._say(identity, encode(self.refusal))
            return
        if hello.epoch not in {0, self.epoch} and hello.memory is None:
            self._say(identity, encode(WhoAreYou(self.epoch)))
            return
        group = self.groups.get(hello.group)
        if group is None or group.life < hello.life:
            group = self.groups[hello.group] = Group(hello.group, hello.world_size, hello.life)
        if group.life > hello.life:
            self._say(identity, encode(Refused("outlived", "of a former life", life=group.life)))
            return
        if hello.memory is not None and len(group.events) < hello.acknowledged:
            assert len(hello.memory.events) == hello.acknowledged
            group.events = list(hello.memory.events)
            group.published = len(group.events)
        member = group.members.get(hello.rank)
        if member is None or member.hello.instance != hello.instance:
            member = group.members[hello.rank] = Member(identity, hello, received=hello.confirmed)
            group.items[hello.rank] = []
        self._known[identity] = member
        have = hello.acknowledged
        events = group.events[have : min(group.published, have + self.max_welcome)]
        welcome = Welcome(
            self.epoch,
            self.advertised,
            have + 1,
            events,
            self._stable(group),
            member.received,
            self.heartbeat_s,
            worker=self.worker,
        )
        self._say(identity, encode(welcome))

    def _submit(self, identity: bytes, submit: Submit) -> None:
        member = self._known.get(identity)
        if member is None or submit.epoch != self.epoch:
            self._say(identity, encode(WhoAreYou(self.epoch)))
            return
        member.acknowledged = max(member.acknowledged, submit.acknowledged)
        member.applied = max(member.applied, submit.applied)
        member.listening = member.listening or submit.listening
        group = self.groups[member.hello.group]
        if submit.first > member.received + 1:
            self._say(identity, encode(Resend(member.received)))
            return
        new = submit.items[member.received + 1 - submit.first :]
        member.received += len(new)
        group.items[member.hello.rank].extend(new)
        self._beat(group)

    def _publish(self, name: str, events: tuple[Event, ...]) -> None:
        group = self.groups[name]
        group.events.extend(events)
        self._beat(group)

    def _stable(self, group: Group) -> int:
        return min((member.acknowledged for member in group.members.values()), default=0)

    def _beat(self, group: Group) -> None:
        group.beaten_at_s = time.monotonic()
        new = group.events[group.published :]
        members = group.members
        missing = [
            rank for rank in range(group.world_size) if rank not in members or not members[rank].listening
        ]
        broadcast = Broadcast(
            self.epoch,
            group.published + 1,
            self._stable(group),
            [members[rank].received if rank in members else 0 for rank in range(group.world_size)],
            missing,
            new,
        )
        group.published += len(new)
        if not self.drop(broadcast):
            self._xpub.send_multipart([group.name.encode() + b"\0", encode(broadcast)])

    def _say(self, identity: bytes, frame: bytes) -> None:
        self._send(self._router, [identity, frame])

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        socket.send_multipart(frames)
