"""Ranks and workers as the coordinator sees them, inside the test's own event loop.

They speak the real protocol over real sockets (inproc), so that a test may run under virtual time,
where no other process could keep up. What they do is what a test tells them to: nothing is answered
by itself except acknowledgements, and moves when the worker is on ``auto``.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

import zmq

from coordinator.channel import Channel
from coordinator.config import Backend, Config, HandoffBounds, Listen
from coordinator.layout import Layout
from coordinator.messages import (
    VERSION,
    Broadcast,
    Cancel,
    Command,
    Commands,
    Connected,
    ConnectPeer,
    Event,
    Extend,
    Fenced,
    FencePeer,
    Hello,
    Item,
    Move,
    MoveDone,
    MoveFailed,
    Offer,
    Open,
    Outcome,
    Pool,
    Process,
    Refused,
    Released,
    Report,
    Reports,
    Resend,
    Revoke,
    Role,
    Send,
    Submit,
    Welcome,
    WhoAreYou,
    WorkerHello,
    decode_broadcast,
    decode_to_rank,
    decode_to_worker,
    encode,
)
from coordinator.service import Service
from coordinator.worker.supervisor import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LAYOUT = Layout(layers=2, page_tokens=16, kv_heads=4, head_size=8, dtype="float16")
PAGES = 64


def pages(*numbers: int) -> bytes:
    """Pack page numbers as the wire has them."""
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


async def eventually(condition: Callable[[], object], bound_s: float = 10.0) -> None:
    """Let the loop run until ``condition`` holds; fail the test when it does not within the bound."""
    deadline_s = asyncio.get_running_loop().time() + bound_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "the condition never held"
        await asyncio.sleep(0.002)


async def turns(count: int = 50) -> None:
    """Give everything that is ready its turn, without letting time pass."""
    for _ in range(count):
        await asyncio.sleep(0)


class StandInWorker(Worker):
    """A worker without a process: a ``WorkerPeer`` of the test speaks for it."""

    def start(self) -> None:
        """Have a secret, and wait for the test's peer."""
        self.lives = 1
        self.token = secrets.token_bytes(32)

    def kill(self, why: str) -> None:
        """Die at once, and be born again."""
        self.killed = why
        self.identity = None
        self.token = secrets.token_bytes(32)
        self._events.worker_down(self, f"killed: {why}")

    async def stop(self) -> None:
        """End."""
        self.identity = None


class Stage:
    """A coordinator on inproc sockets, and the peers that a test puts around it."""

    _numbers = itertools.count()

    def __init__(self, config: Config | None = None) -> None:
        number = next(self._numbers)
        listen = Listen.model_construct(
            control=(f"inproc://control-{number}",), outcomes=(f"inproc://outcomes-{number}",), advertise=""
        )
        # The pools of these ranks are only numbers: nobody maps them.
        backend = Backend(hosting="rank")
        self.config = (config or Config()).model_copy(update={"listen": listen, "backend": backend})
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.service = Service(self.config, self.context, hire=StandInWorker)
        self.peers: list[Peer] = []

    async def __aenter__(self) -> Stage:
        await self.service.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for handoff in [*self.service.rooms.active.values(), *self.service.rooms.unreleased]:
            handoff.machine.validate()
        for peer in self.peers:
            peer.close()
        self.service.rooms.fail_all(set(self.service.rooms.active.values()), "draining", "the test is over")  # type: ignore[arg-type]
        await self.service.stop()

    async def group(self, role: Role, name: str, world_size: int, **changes: object) -> list[RankPeer]:
        """Let a whole group join and be ready."""
        ranks = [RankPeer(self, role, name, number, world_size, **changes) for number in range(world_size)]
        for rank in ranks:
            await rank.join()
        await eventually(lambda: self.service.membership.groups[name].ready)
        return ranks

    async def workers(self, *, auto: bool = True) -> list[WorkerPeer]:
        """Let a peer speak for every worker that has none."""
        found = []
        for crew in self.service.transfers.crews.values():
            if crew.worker.identity is None:
                peer = WorkerPeer(self, crew.worker, auto=auto)
                await peer.join()
                found.append(peer)
        return found

    async def pair(
        self, world_size: int = 1, *, auto: bool = True
    ) -> tuple[list[RankPeer], list[RankPeer], list[WorkerPeer]]:
        """A prefill group ``p``, a decode group ``d``, and the workers between them."""
        prefill = await self.group(Role.PREFILL, "p", world_size)
        decode = await self.group(Role.DECODE, "d", world_size)
        return prefill, decode, await self.workers(auto=auto)


class Peer:
    """A DEALER of a test's own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.identity = secrets.token_bytes(16)
        socket = stage.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.channel = Channel(socket, self.on_frames)
        self._socket = socket
        stage.peers.append(self)

    def open(self) -> None:
        """Connect."""
        self._socket.connect(self.stage.config.listen.control[0])
        self.channel.start()

    def send(self, message: object) -> None:
        """Send a message, or raw bytes."""
        assert self.channel.send([message if isinstance(message, bytes) else encode(message)])

    def on_frames(self, frames: list[bytes]) -> None:
        """Take what the coordinator says."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the sockets."""
        self.channel.close()


class RankPeer(Peer):
    """One rank: acknowledges what it hears, and remembers it."""

    def __init__(
        self, stage: Stage, role: Role, group: str, rank: int, world_size: int, **changes: object
    ) -> None:
        super().__init__(stage)
        layout = changes.get("layout", LAYOUT)
        assert isinstance(layout, Layout)
        fields: dict[str, object] = {
            "version": VERSION,
            "role": role,
            "group": group,
            "rank": rank,
            "world_size": world_size,
            "instance": secrets.randbits(63),
            "process": Process(1, "elsewhere", 0),
            "backend": stage.config.backend.name,
            "layout": layout,
            "pool": Pool(
                "", layout.pool_bytes(PAGES, world_size) if layout.kv_heads % world_size == 0 else 0, PAGES
            ),
            "endpoint": b"here" if role is Role.DECODE else b"",
            "transport": "inproc",
        }
        self.hello = Hello(**(fields | changes))  # type: ignore[arg-type]
        self.events: list[Event] = []
        self.refusals: list[Refused] = []
        self.broadcasts: list[Broadcast] = []
        self.epoch = 0
        self.head = 0
        self.applied = 0
        self.stable = 0
        self.sent = 0
        self.listening = False
        self.acknowledges = True
        self.welcomed = 0
        self._outcomes: Channel | None = None

    async def join(self) -> None:
        """Say hello and wait for the welcome."""
        self.open()
        self.send(self.hello)
        await eventually(lambda: self.welcomed or self.refusals)

    def submit(self, *items: Item) -> None:
        """Submit items, and what has been heard."""
        message = Submit(self.epoch, self.sent + 1, self.head, self.applied, self.listening, list(items))
        self.sent += len(items)
        self.send(message)

    def open_room(self, room: int) -> None:
        """Prefill has queued the room."""
        self.submit(Open(room, self.applied))

    def send_pages(self, room: int, *numbers: int, last: bool = True, aux: bytes = b"") -> None:
        """Prefill's pages."""
        self.submit(Send(room, self.applied, pages(*numbers), last, aux))

    def offer(self, room: int, *numbers: int, prefix: int = 0) -> None:
        """Decode's pages."""
        self.submit(Offer(room, self.applied, pages(*numbers), prefix))

    def extend(self, room: int) -> None:
        """Decode needs more time."""
        self.submit(Extend(room, self.applied))

    def cancel(self, room: int, why: str = "") -> None:
        """The engine gives up."""
        self.submit(Cancel(room, self.applied, why))

    def drain(self) -> None:
        """The engine has applied all that has come."""
        self.applied = self.head
        self.submit()

    def outcomes(self, room: int | None = None) -> list[Outcome]:
        """The verdicts heard, of one room or of all."""
        return [e for e in self.events if isinstance(e, Outcome) and room in {None, e.room}]

    def released(self, room: int) -> list[Released]:
        """The releases heard of a room."""
        return [e for e in self.events if isinstance(e, Released) and e.room == room]

    async def outcome(self, room: int, attempt: int = 1) -> Outcome:
        """Wait for the verdict of a room's attempt."""
        await eventually(lambda: any(o.attempt == attempt for o in self.outcomes(room)), 100_000)
        return next(o for o in self.outcomes(room) if o.attempt == attempt)

    def on_frames(self, frames: list[bytes]) -> None:
        message = decode_to_rank(frames[0])
        match message:
            case Welcome():
                self.epoch, self.welcomed, self.stable = message.epoch, self.welcomed + 1, message.stable
                self._hear(message.first, message.events)
                self._subscribe(message.outcomes)
            case Refused():
                self.refusals.append(message)
            case WhoAreYou():
                self.send(self.hello)
            case Resend():
                raise AssertionError("nothing is lost on inproc")

    def _subscribe(self, address: str) -> None:
        if self._outcomes is not None:
            return
        socket = self.stage.context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.setsockopt(zmq.SUBSCRIBE, self.hello.group.encode() + b"\0")
        self._outcomes = Channel(socket, self._on_broadcast)
        self._outcomes.start()

    def _on_broadcast(self, frames: list[bytes]) -> None:
        message = decode_broadcast(frames[1])
        first = not self.listening
        self.listening = True
        self.broadcasts.append(message)
        self.stable = message.stable
        if self._hear(message.first, message.events) or first:
            self.submit()

    def _hear(self, first: int, events: Iterable[Event]) -> bool:
        if not self.acknowledges:
            return False
        before = self.head
        for number, event in enumerate(events, first):
            assert number <= self.head + 1, "a gap"
            if number == self.head + 1:
                self.head = number
                self.events.append(event)
        return self.head > before

    def close(self) -> None:
        super().close()
        if self._outcomes is not None:
            self._outcomes.close()


class WorkerPeer(Peer):
    """Speaks for one worker. On ``auto`` connects and moves succeed at once."""

    def __init__(self, stage: Stage, worker: Worker, *, auto: bool) -> None:
        super().__init__(stage)
        self.worker = worker
        self.auto = auto
        self.commands: list[Command] = []

    async def join(self) -> None:
        """Introduce itself."""
        self.open()
        self.send(WorkerHello(VERSION, self.worker.token, 1, lands_after_settled=True))
        await eventually(lambda: self.worker.identity == self.identity)

    def report(self, *items: Report) -> None:
        """Report to the coordinator."""
        self.send(Reports(list(items)))

    def moves(self) -> list[Move]:
        """The moves that were asked for."""
        return [command for command in self.commands if isinstance(command, Move)]

    def done(self, move: Move) -> None:
        """Report that a move has arrived."""
        self.report(MoveDone(move.move, len(move.source_pages) * 64, 0.001))

    def failed(
        self, move: Move, kind: str = "transport", *, settled: bool = True, started: bool = True
    ) -> None:
        """Report that a move has failed."""
        self.report(MoveFailed(move.move, kind, "as the test says", settled, started))

    def on_frames(self, frames: list[bytes]) -> None:
        message = decode_to_worker(frames[0])
        if not isinstance(message, Commands):
            return
        self.commands += message.items
        for command in message.items:
            match command:
                case ConnectPeer() if self.auto:
                    self.report(Connected(command.peer, 0.001))
                case Move() if self.auto:
                    self.done(command)
                case FencePeer() if self.auto:
                    self.report(Fenced(command.peer))
                case Revoke():
                    pass


def bounds(**changes: float) -> Config:
    """A configuration with other bounds of a handoff."""
    return Config(handoff=HandoffBounds(**changes))
