"""Ranks, workers and accidents that do what a seed says, for the random test."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from coordinator.messages import Commands as CommandsMessage
from coordinator.messages import (
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
    Move,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Outcome,
    Progress,
    Released,
    Revoke,
    Role,
    decode_to_worker,
)
from tests.service.peers import RankPeer, WorkerPeer, pool
from tests.service.stage import now_s

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from coordinator.messages import Command, Event
    from coordinator.worker.supervisor import Worker
    from tests.service.stage import Stage

#: Every room has pages of its own, so that a move tells its room.
PAGES_PER_ROOM: Final = 4
POOL_PAGES: Final = 1024


def room_of(pages: bytes) -> int:
    """The room that a move's pages belong to."""
    return int.from_bytes(pages[:4], "little") // PAGES_PER_ROOM


class ChaosWorker(WorkerPeer):
    """A worker that connects, moves, fails and hangs as the dice say.

    Attributes:
        unquiet: its moves that may still read or write pages; ``attempts`` says of which attempts.

    """

    def __init__(self, stage: Stage, worker: Worker, dice: random.Random) -> None:
        super().__init__(stage, worker, auto=False)
        self.dice = dice
        self.unquiet: dict[int, Move] = {}
        self.attempts: dict[int, int] = {}

    def on_frames(self, frames: list[bytes]) -> None:
        message = decode_to_worker(frames[0])
        for command in message.items if isinstance(message, CommandsMessage) else ():
            self._obey(command)

    def touches(self, room: int, attempt: int, peer: str | None) -> bool:
        """Whether it may still touch pages of an attempt, of one peer or of any."""
        return any(
            (room_of(move.source_pages), self.attempts[number]) == (room, attempt)
            and peer in {None, move.peer}
            for number, move in self.unquiet.items()
        )

    def _later(self, most_s: float, do: object, *arguments: object) -> None:
        asyncio.get_running_loop().call_later(self.dice.uniform(0, most_s), do, *arguments)  # type: ignore[arg-type]

    def _obey(self, command: Command) -> None:
        match command:
            case ConnectPeer(peer=peer):
                works = self.dice.random() < 0.9
                self._later(3.0, self._report, Connected(peer, 1.0) if works else ConnectFailed(peer, "dice"))
            case Move():
                self.unquiet[command.move] = command
                flight = self.stage.service.transfers.flights.get(command.move)
                assert flight is not None, "a move was sent, and then forgotten"
                self.attempts[command.move] = flight.handoff.machine.attempt
                self._move(command)
            case Revoke(moves=moves):
                for number in moves:
                    self._later(1.0, self._revoked, number)
            case FencePeer(peer=peer):
                self._later(1.0, self._fence, peer)

    def _move(self, move: Move) -> None:
        roll = self.dice.random()
        if roll < 0.8:
            self._later(5.0, self._done, move)
        elif roll < 0.9:
            self._later(5.0, self._fail, move, self.dice.choice(["transport", "disconnected"]))
        elif roll < 0.95:
            self._later(30.0, self._report, Progress([move.move]))
            self._later(100.0, self._done, move)
        # else it hangs

    def _report(self, *reports: object) -> None:
        if self.worker.identity == self.identity:
            self.report(*reports)  # type: ignore[arg-type]

    def _done(self, move: Move) -> None:
        if self.unquiet.pop(move.move, None) is not None:
            self._report(MoveDone(move.move, len(move.source_pages), 0.1))

    def _fail(self, move: Move, kind: str) -> None:
        if move.move not in self.unquiet:
            return
        settled = self.dice.random() < 0.7
        if settled:
            del self.unquiet[move.move]
        self._report(MoveFailed(move.move, kind, "dice", settled=settled, started=True))
        if not settled:
            self._later(10.0, self._settle, move)

    def _settle(self, move: Move) -> None:
        if self.unquiet.pop(move.move, None) is not None:
            self._report(MoveSettled(move.move))

    def _revoked(self, number: int) -> None:
        # What is posted cannot be called back, as with any real engine.
        if number in self.unquiet and self.dice.random() < 0.5:
            del self.unquiet[number]
            self._report(MoveFailed(number, "revoked", "revoked", settled=True, started=False))

    def _fence(self, peer: str) -> None:
        if self.dice.random() < 0.2:
            self._report(Fenced(peer, "the dice say no"))
            return
        for number, move in list(self.unquiet.items()):
            if move.peer == peer:
                del self.unquiet[number]
                self._report(MoveFailed(number, "disconnected", "fenced", settled=True, started=True))
        self._report(Fenced(peer))


class ChaosRank(RankPeer):
    """A rank that checks, whenever it hears of a release, that nothing touches its pages any more.

    Attributes:
        engine: its engine's name, and which engine of that name it is.

    """

    def __init__(self, chaos: Chaos, role: Role, group: str, rank: int) -> None:
        super().__init__(
            chaos.stage, role, group, rank, chaos.world_size, pool=pool(POOL_PAGES, chaos.world_size)
        )
        self.chaos = chaos
        self.engine = (group, chaos.generations[group])
        self.open()

    def _hear(self, first: int, events: Iterable[Event]) -> bool:
        known = len(self.events)
        changed = super()._hear(first, events)
        for event in self.events[known:]:
            if isinstance(event, Released):
                self.chaos.released(self, event)
        return changed


@dataclass
class Chaos:
    """A coordinator with two prefill and two decode engines, and what happens to them."""

    stage: Stage
    dice: random.Random
    world_size: int = 2
    rooms: int = 40
    ranks: dict[str, list[ChaosRank]] = field(default_factory=dict)
    former: list[ChaosRank] = field(default_factory=list)
    workers: list[ChaosWorker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    generations: Counter[str] = field(default_factory=Counter)
    calm: bool = False
    over: bool = False

    async def start(self) -> None:
        """Let all engines join."""
        for role, name in (
            (Role.PREFILL, "p0"),
            (Role.PREFILL, "p1"),
            (Role.DECODE, "d0"),
            (Role.DECODE, "d1"),
        ):
            self.ranks[name] = [ChaosRank(self, role, name, number) for number in range(self.world_size)]
            for rank in self.ranks[name]:
                await rank.join()

    def engines(self, room: int) -> tuple[str, str]:
        """Which two engines a room is handed over between."""
        return f"p{room % 2}", f"d{room // 2 % 2}"

    def released(self, rank: ChaosRank, event: Released) -> None:
        """Check that no worker may touch the pages of this rank any more."""
        prefill, _ = self.engines(event.room)
        # Ranks are paired by number.
        sender = self.ranks[prefill][rank.hello.rank]
        peer = None if rank is sender else f"{rank.name}#{rank.hello.instance:x}"
        for worker in self.workers:
            alive = worker.worker.identity == worker.identity
            is_the_senders = worker.worker.rank.hello.instance == sender.hello.instance
            if alive and is_the_senders and worker.touches(event.room, event.attempt, peer):
                self.problems.append(f"{now_s():.2f}: {rank.name} heard {event} too early")

    # What the engines do

    async def hand_over(self, room: int) -> None:
        """Every rank of both engines does its part of a room, each at its own time."""
        names = self.engines(room)
        await asyncio.sleep(self.dice.uniform(0, 200))
        for _ in range(self.dice.randint(1, 3)):
            ranks = [rank for name in names for rank in self.ranks[name]]
            skipped = self.dice.choice(ranks) if self.dice.random() < 0.1 else None
            await asyncio.gather(*(self._part(rank, room) for rank in ranks if rank is not skipped))
            if self.dice.random() < 0.1:
                self.dice.choice(ranks).cancel(room)
            # An engine uses its pages again when they are released, not before.
            await self._over(ranks, room)
            for rank in ranks:
                rank.drain()

    async def _part(self, rank: ChaosRank, room: int) -> None:
        await asyncio.sleep(self.dice.uniform(0, 10))
        pages = [room * PAGES_PER_ROOM + number for number in range(PAGES_PER_ROOM)]
        if rank.hello.role is Role.DECODE:
            if self.dice.random() < 0.1:
                rank.extend(room)
            rank.offer(room, *pages)
            return
        if self.dice.random() < 0.5:
            rank.open_room(room)
        for page in pages[:-1]:
            await asyncio.sleep(self.dice.uniform(0, 3))
            rank.send_pages(room, page, last=False)
        if self.dice.random() < 0.02:
            rank.cancel(room, "dice")
            return
        rank.send_pages(room, pages[-1])

    async def _over(self, ranks: list[ChaosRank], room: int) -> None:
        """Wait until whoever has heard of the room has heard all; give it up when that takes too long."""
        for _ in range(400):
            await asyncio.sleep(1)
            heard = [rank for rank in ranks if rank.outcomes(room)]
            if len(heard) == len(ranks) and all(
                len(rank.released(room)) == len(rank.outcomes(room)) for rank in heard
            ):
                return
        for rank in ranks:
            rank.cancel(room, "given up")

    # What happens to them

    async def midwife(self) -> None:
        """Let a peer speak for every worker that has none."""
        while not self.over:
            await asyncio.sleep(self.dice.uniform(0.1, 2))
            for crew in list(self.stage.service.transfers.crews.values()):
                worker = crew.worker
                if worker.identity is None and not worker._stopping.is_set():
                    peer = ChaosWorker(self.stage, worker, self.dice)
                    self.workers.append(peer)
                    await peer.join()

    async def drainer(self) -> None:
        """Every engine drains now and then."""
        while not self.over:
            await asyncio.sleep(self.dice.uniform(0.5, 3))
            for ranks in self.ranks.values():
                for rank in ranks:
                    if not rank.stopped and self.dice.random() < 0.5:
                        rank.drain()

    async def accidents(self) -> None:
        """Break something now and then."""
        while not self.calm:
            await asyncio.sleep(self.dice.uniform(5, 40))
            name = self.dice.choice(sorted(self.ranks))
            number = self.dice.randrange(self.world_size)
            rank = self.ranks[name][number]
            match self.dice.randrange(5):
                case 0:
                    rank.stop()
                    await asyncio.sleep(self.dice.uniform(0.5, 25))
                    rank.resume()
                case 1:
                    await self._replace(rank)
                case 2:
                    await self._restart(name)
                case 3 if rank.hello.role is Role.PREFILL:
                    self.stage.worker(rank).die()
                case _:
                    rank.again()

    async def _replace(self, rank: ChaosRank) -> None:
        self.stage.died(rank)
        self.former.append(rank)
        await asyncio.sleep(self.dice.uniform(0, 5))
        new = ChaosRank(self, rank.hello.role, rank.hello.group, rank.hello.rank)
        self.ranks[rank.hello.group][rank.hello.rank] = new
        await new.join()

    async def _restart(self, name: str) -> None:
        """A whole engine dies, and a new one of the same name comes."""
        for rank in self.ranks[name]:
            self.stage.died(rank)
        self.former += self.ranks[name]
        self.generations[name] += 1
        role = self.ranks[name][0].hello.role
        await asyncio.sleep(self.dice.uniform(0, 5))
        self.ranks[name] = [ChaosRank(self, role, name, number) for number in range(self.world_size)]
        for rank in self.ranks[name]:
            await rank.join()

    async def run(self) -> None:
        """Everything at once, until all rooms are over; then let the dust settle."""
        background = [asyncio.ensure_future(work()) for work in (self.midwife, self.drainer, self.accidents)]
        await asyncio.gather(*(self.hand_over(room) for room in range(1, self.rooms + 1)))
        self.calm = True
        await background.pop()
        await asyncio.sleep(30)
        for room in list(self.stage.service.rooms.active):
            for name in self.engines(room):
                self.ranks[name][0].drain()
                self.ranks[name][0].cancel(room, "the end")
        await asyncio.sleep(60)
        for ranks in self.ranks.values():
            for rank in ranks:
                rank.drain()
        self.over = True
        await asyncio.gather(*background)

    # What must hold at the end

    def check(self) -> None:
        """Assert that all ranks of a group heard the same, and that everything heard makes sense."""
        assert not self.problems, self.problems
        verdicts: dict[tuple[int, int], bool] = {}
        everybody = self.former + [rank for ranks in self.ranks.values() for rank in ranks]
        for engine in {rank.engine for rank in everybody}:
            by_number: dict[int, Event] = {}
            for rank in everybody:
                for number, event in enumerate(rank.events, rank.base + 1) if rank.engine == engine else ():
                    assert by_number.setdefault(number, event) == event, (
                        f"{rank.name} heard otherwise: {event}"
                    )
            dead = engine[1] < self.generations[engine[0]]
            self._one_verdict_each([by_number[number] for number in sorted(by_number)], dead=dead)
            for event in by_number.values():
                if isinstance(event, Outcome):
                    key = (event.room, event.attempt)
                    assert verdicts.setdefault(key, event.succeeded) == event.succeeded, (
                        f"{key}: sides disagree"
                    )
        for ranks in self.ranks.values():
            assert len({rank.head for rank in ranks}) == 1, "somebody missed the last"

    @staticmethod
    def _one_verdict_each(events: list[Event], *, dead: bool) -> None:
        outcomes = [(e.room, e.attempt) for e in events if isinstance(e, Outcome)]
        releases = [(e.room, e.attempt) for e in events if isinstance(e, Released)]
        assert len(set(outcomes)) == len(outcomes), "one verdict per attempt"
        assert len(set(releases)) == len(releases), "one release per attempt"
        assert dead or set(outcomes) == set(releases), "one release per verdict"
        decided = set()
        for event in events:
            if isinstance(event, Outcome):
                decided.add((event.room, event.attempt))
            else:
                assert (event.room, event.attempt) in decided, "no release before its verdict"
