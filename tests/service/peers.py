"""Ranks and workers as the coordinator sees them, inside the test's own event loop.

They speak the real protocol over real sockets (inproc), so that a test may run under virtual time,
where no other process could keep up. By itself a rank acknowledges, gives signs of life and sends
again what did not arrive; a worker on ``auto`` connects and moves. Everything else is the test's.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final, TypeVar

import zmq

from coordinator.channel import Channel
from coordinator.errors import LayoutError
from coordinator.layout import Layout
from coordinator.messages import (
    VERSION,
    Broadcast,
    Bye,
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
    ToRank,
    Welcome,
    WhoAreYou,
    WorkerHello,
    WorkerOrders,
    decode_broadcast,
    decode_to_rank,
    decode_to_worker,
    encode,
)
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.worker.supervisor import Worker
    from tests.service.stage import Stage

C = TypeVar("C", ConnectPeer, Move, Revoke, FencePeer)

LAYOUT: Final = Layout(layers=2, page_tokens=16, kv_heads=8, head_size=8, dtype="float16")
PAGES: Final = 64


def pages(*numbers: int) -> bytes:
    """Pack page numbers as the wire has them."""
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def pool(count: int, world_size: int = 1) -> Pool:
    """A pool of ``count`` pages."""
    return Pool("", LAYOUT.pool_bytes(count, world_size), count)


def hello(stage: Stage, role: Role, group: str, rank: int, world_size: int, **changes: object) -> Hello:
    """What a rank says to the coordinator of a stage, some of it changed."""
    ours: dict[str, object] = {"backend": stage.config.backend.name, "transport": "inproc"}
    return hello_of(role, group, rank, world_size, **(ours | changes))


def hello_of(role: Role, group: str, rank: int, world_size: int, **changes: object) -> Hello:
    """What a rank says of itself, some of it changed."""
    layout = changes.get("layout", LAYOUT)
    assert isinstance(layout, Layout)
    try:
        layout.check(world_size)
        size_bytes = layout.pool_bytes(PAGES, world_size, rank)
    except (LayoutError, IndexError):  # on purpose: what such a rank says is to be refused
        size_bytes = 0
    fields: dict[str, object] = {
        "version": VERSION,
        "role": role,
        "group": group,
        "rank": rank,
        "world_size": world_size,
        "instance": secrets.randbits(63),
        "process": Process(1, "elsewhere", 0),
        "layout": layout,
        "pool": Pool("", size_bytes, PAGES),
        "endpoint": b"here" if role is Role.DECODE else b"",
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


class Peer:
    """A DEALER of a test's own.

    Attributes:
        answers: what came back, as frames; for tests that send what no client would.

    """

    def __init__(self, stage: Stage, identity: bytes | None = None) -> None:
        self.stage = stage
        self.identity = identity or b"t" + secrets.token_bytes(15)
        self.answers: list[bytes] = []
        self.is_open = False
        self.socket = stage.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
        self.channel = Channel(self.socket, self.on_frames)
        stage.peers.append(self)

    def open(self) -> None:
        """Connect, unless that is done."""
        if not self.is_open:
            self.is_open = True
            self.socket.connect(self.stage.config.listen.control[0])
            self.channel.start()

    def send(self, *messages: object) -> None:
        """Send one message; raw bytes stay as they are, several are several frames."""
        frames = [message if isinstance(message, bytes) else encode(message) for message in messages]
        assert self.channel.send(frames), f"not sent; closed: {self.channel._closed}"

    def on_frames(self, frames: list[bytes]) -> None:
        """Take what the coordinator says."""
        self.answers.append(frames[0])

    async def refusal(self) -> Refused:
        """Wait for a refusal."""
        await eventually_async(lambda: self.answers, what="an answer")
        answer = decode_to_rank(self.answers.pop(0))
        assert isinstance(answer, Refused)
        return answer

    def close(self) -> None:
        """Close the sockets."""
        self.channel.close()


class RankPeer(Peer):
    """One rank: acknowledges what it hears, and remembers it.

    Attributes:
        events: what it heard, in order; ``heard_at_s`` says when, on the loop's clock.
        said: the items that it ever submitted, the first of which has the number 1.
        stopped: as SIGSTOP would leave it: it says and hears nothing.
        largest_bytes: of the messages that it got.

    """

    def __init__(
        self, stage: Stage, role: Role, group: str, rank: int, world_size: int, **changes: object
    ) -> None:
        self.hello = hello(stage, role, group, rank, world_size, **changes)
        super().__init__(stage)
        self.events: list[Event] = []
        self.heard_at_s: list[float] = []
        self.refusals: list[Refused] = []
        self.broadcasts: list[Broadcast] = []
        self.said: list[Item] = []
        self.epoch = 0
        self.base = 0
        self.head = 0
        self.applied = 0
        self.stable = 0
        self.listening = False
        self.stopped = False
        self.acknowledges = True
        self.largest_bytes = 0
        self.welcomed = 0
        self.orders: WorkerOrders | None = None
        self._news = asyncio.Event()
        self._outcomes: Channel | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._asked = False
        self._unread: list[tuple[Callable[[list[bytes]], None], list[bytes]]] = []

    @property
    def name(self) -> str:
        """``group/rank``."""
        return f"{self.hello.group}/{self.hello.rank}"

    async def join(self) -> None:
        """Say hello and wait for the answer."""
        self.open()
        self.send(self.hello)
        await eventually_async(lambda: self.welcomed or self.refusals, what="a welcome or a refusal")

    def again(self) -> None:
        """Say hello again, with what was heard so far."""
        self.send(self.hello_again() if self.welcomed else self.hello)

    def leave(self, why: str = "") -> None:
        """Say goodbye, and nothing after it."""
        self.send(Bye(why))
        self.stop()

    def stop(self) -> None:
        """Say and hear nothing any more, until ``resume``."""
        self.stopped = True
        if self._beat is not None:
            self._beat.cancel()

    def resume(self) -> None:
        """Go on after ``stop``: the first that it does is a sign of life."""
        self.stopped = False
        self._sign()
        unread, self._unread = self._unread, []
        for take, frames in unread:
            take(frames)

    # What an engine says

    def submit(self, *items: Item) -> None:
        """Submit items, and what has been heard."""
        self.submit_from(len(self.said) + 1, *items)
        self.said += items

    def submit_from(self, first: int, *items: Item) -> None:
        """Submit items with a number of the test's choice."""
        self.send(Submit(self.epoch, first, self.head, self.applied, self.listening, list(items)))

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

    # What it heard

    def outcomes(self, room: int | None = None) -> list[Outcome]:
        """The verdicts heard, of one room or of all."""
        return [e for e in self.events if isinstance(e, Outcome) and room in {None, e.room}]

    def released(self, room: int) -> list[Released]:
        """The releases heard of a room."""
        return [e for e in self.events if isinstance(e, Released) and e.room == room]

    async def outcome(self, room: int, attempt: int = 1) -> Outcome:
        """Wait for the verdict of a room's attempt."""
        await self._until(lambda: any(o.attempt == attempt for o in self.outcomes(room)))
        verdicts = [o for o in self.outcomes(room) if o.attempt == attempt]
        assert len(verdicts) == 1, "one verdict per attempt"
        return verdicts[0]

    async def failure(self, room: int, attempt: int = 1) -> str:
        """Wait for the verdict of a room's attempt, which must be a failure; returns its reason."""
        outcome = await self.outcome(room, attempt)
        assert outcome.failure is not None, "it succeeded"
        return outcome.failure.reason.value

    async def release(self, room: int, attempt: int = 1) -> Released:
        """Wait for the release of a room's attempt."""
        await self._until(lambda: any(r.attempt == attempt for r in self.released(room)))
        releases = [r for r in self.released(room) if r.attempt == attempt]
        assert len(releases) == 1, "one release per attempt"
        return releases[0]

    async def heard(self, count: int, kind: type[Event]) -> None:
        """Wait until it has heard this many events of a kind."""
        await self._until(lambda: sum(isinstance(event, kind) for event in self.events) >= count)

    def when(self, kind: type[Event], room: int, attempt: int = 1) -> float:
        """When it heard an event of this kind."""
        for event, at_s in zip(self.events, self.heard_at_s, strict=True):
            if isinstance(event, kind) and (event.room, event.attempt) == (room, attempt):
                return at_s
        message = f"{self.name} has heard no {kind.__name__} of room {room}, attempt {attempt}"
        raise AssertionError(message)

    async def refused(self) -> Refused:
        """Wait for a refusal, and take it."""
        await eventually_async(lambda: self.refusals, what="a refusal")
        return self.refusals.pop(0)

    async def _until(self, condition: Callable[[], bool]) -> None:
        # By event, not by polling: under virtual time hours pass while nothing happens.
        async with asyncio.timeout(20_000 if self.stage.virtual else 20):
            while not condition():
                self._news.clear()
                await self._news.wait()

    # How it speaks the protocol

    def on_frames(self, frames: list[bytes]) -> None:
        if self.stopped:
            self._unread.append((self.on_frames, frames))
            return
        self.largest_bytes = max(self.largest_bytes, len(frames[0]))
        self._take(decode_to_rank(frames[0]))

    def _take(self, message: ToRank) -> None:
        match message:
            case Welcome():
                self.epoch, self.stable = message.epoch, message.stable
                self._asked = False
                if not self.welcomed:
                    self.base = self.head = self.applied = message.first - 1
                self.welcomed += 1
                self.orders = message.worker
                self._hear(message.first, message.events)
                self._subscribe(message.outcomes)
                self._send_again(message.received)
                self._give_signs()
            case Refused():
                self.refusals.append(message)
            case WhoAreYou():
                self.again()
            case Resend(received=received):
                self._send_again(received)

    def _send_again(self, received: int) -> None:
        if received < len(self.said):
            self.submit_from(received + 1, *self.said[received:])

    def _give_signs(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        heartbeat_s = self.stage.config.rank.heartbeat_s
        self._beat = asyncio.get_running_loop().call_later(heartbeat_s, self._sign)

    def _sign(self) -> None:
        self.submit()
        self._give_signs()

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
        if self.stopped:
            self._unread.append((self._on_broadcast, frames))
            return
        self.largest_bytes = max(self.largest_bytes, len(frames[1]))
        message = decode_broadcast(frames[1])
        first = not self.listening
        self.listening = True
        self.broadcasts.append(message)
        self.stable = message.stable
        if message.first > self.head + 1:
            if not self._asked:
                self._asked = True
                self.again()
        elif self._hear(message.first, message.events) or first:
            self.submit()

    def hello_again(self) -> Hello:
        """The hello of a rank that has something already."""
        fields = {name: getattr(self.hello, name) for name in Hello.__struct_fields__}
        have = {"epoch": self.epoch, "acknowledged": self.head, "confirmed": len(self.said)}
        return Hello(**(fields | have))

    def _hear(self, first: int, events: Iterable[Event]) -> bool:
        if not self.acknowledges:
            return False
        before = self.head
        now_s = asyncio.get_running_loop().time()
        for number, event in enumerate(events, first):
            assert number <= self.head + 1, "a gap"
            if number == self.head + 1:
                self.head = number
                self.events.append(event)
                self.heard_at_s.append(now_s)
        self._news.set()
        return self.head > before

    def close(self) -> None:
        super().close()
        if self._beat is not None:
            self._beat.cancel()
        if self._outcomes is not None:
            self._outcomes.close()


class WorkerPeer(Peer):
    """Speaks for one worker. On ``auto`` connects, moves and fences succeed at once.

    Attributes:
        commands: what it was told to do, in order; ``commanded_at_s`` says when.
        largest_bytes: the size of the largest message that it got.

    """

    def __init__(self, stage: Stage, worker: Worker, *, auto: bool) -> None:
        super().__init__(stage)
        self.worker = worker
        self.auto = auto
        self.commands: list[Command] = []
        self.commanded_at_s: list[float] = []
        self.largest_bytes = 0
        self.lands_after_settled = True

    async def join(self) -> None:
        """Introduce itself."""
        self.open()
        self.send(WorkerHello(VERSION, self.worker.token, 1, self.lands_after_settled))
        await eventually_async(lambda: self.worker.identity == self.identity, what="the worker is up")

    def report(self, *items: Report) -> None:
        """Report to the coordinator."""
        self.send(Reports(list(items)))

    def of(self, kind: type[C]) -> list[C]:
        """The commands of one kind."""
        return [command for command in self.commands if isinstance(command, kind)]

    def moves(self) -> list[Move]:
        """The moves that were asked for."""
        return [command for command in self.commands if isinstance(command, Move)]

    def revoked(self) -> set[int]:
        """The moves that were revoked."""
        return {move for command in self.commands if isinstance(command, Revoke) for move in command.moves}

    async def commanded(self, count: int = 1) -> None:
        """Wait until it was told to do ``count`` things."""
        await eventually_async(lambda: len(self.commands) >= count, 20.0, f"{count} commands")

    async def move(self, index: int = 0) -> Move:
        """Wait for a move that was asked for."""
        await eventually_async(lambda: len(self.moves()) > index, what=f"move {index}")
        return self.moves()[index]

    def forget_commands(self) -> None:
        """Begin anew with what it was told to do."""
        self.commands.clear()
        self.commanded_at_s.clear()

    def connect_all(self) -> None:
        """Report every connect that it was asked for as done."""
        for command in self.commands:
            if isinstance(command, ConnectPeer):
                self.report(Connected(command.peer, 0.001))

    def done(self, move: Move) -> None:
        """Report that a move has arrived."""
        self.report(MoveDone(move.move, len(move.source_pages) * 64, 0.001))

    def failed(
        self, move: Move, kind: str = "transport", *, settled: bool = True, started: bool = True
    ) -> None:
        """Report that a move has failed."""
        self.report(MoveFailed(move.move, kind, "as the test says", settled, started))

    def on_frames(self, frames: list[bytes]) -> None:
        self.largest_bytes = max(self.largest_bytes, len(frames[0]))
        message = decode_to_worker(frames[0])
        if not isinstance(message, Commands):
            return
        self.commands += message.items
        self.commanded_at_s += [asyncio.get_running_loop().time()] * len(message.items)
        for command in message.items if self.auto else ():
            match command:
                case ConnectPeer():
                    self.report(Connected(command.peer, 0.001))
                case Move():
                    self.done(command)
                case FencePeer():
                    self.report(Fenced(command.peer))
                case Revoke():
                    pass
