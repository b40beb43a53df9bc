"""A coordinator inside the test's own event loop, and the peers that a test puts around it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING, Self

import pytest
import zmq
from looptime import LoopTimeEventLoop

from coordinator.config import Config, Listen
from coordinator.events import State
from coordinator.messages import Role
from coordinator.reasons import Reason
from coordinator.service import Service
from coordinator.worker.supervisor import Worker
from tests.service.peers import RankPeer, WorkerPeer
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from coordinator.groups import Rank
    from coordinator.messages import Memory
    from tests.service.peers import Peer

#: For a test under virtual time. Of the rounds in which the loop makes sure that nothing is left to do
#: before it lets time pass, few are enough here: inproc sockets are ready at once.
virtual_time = pytest.mark.looptime(noop_cycles=2)


def now_s() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()


def config(**sections: dict[str, object]) -> Config:
    """A configuration with other values, as ``config(handoff={"deadline_s": 60.0})``."""
    return Config.model_validate(sections)


async def turns(count: int = 50) -> None:
    """Give everything that is ready its turn, without letting time pass."""
    for _ in range(count):
        await asyncio.sleep(0)


class StandInWorker(Worker):
    """A worker without a process: a ``WorkerPeer`` of the test speaks for it.

    Attributes:
        killed: why it was killed, each time.
        immortal: it does not die, as a process that hangs in the kernel; until ``die``.

    """

    killed: list[str]
    immortal = False
    _dead: asyncio.Event

    def start(self) -> None:
        """Have a secret, and wait for the test's peer."""
        self.killed = []
        self._dead = asyncio.Event()
        self._born()

    def kill(self, why: str) -> None:
        """Die soon, and be born again."""
        self.killed.append(why)
        if not self.immortal:
            asyncio.get_running_loop().call_soon(self.die, f"killed: {why}")

    def die(self, cause: str = "killed by signal 11", *, hopeless: bool = False) -> None:
        """Die by itself, and be born again unless that is hopeless."""
        self.hopeless = hopeless
        self.trouble = cause
        self._events.worker_down(self, cause)
        self.identity = None
        if hopeless or self._stopping.is_set():
            self._dead.set()
        else:
            self._born()

    async def stop(self) -> None:
        """End; at once unless it is immortal."""
        self._stopping.set()
        if self.immortal:
            await self._dead.wait()
        elif not self._dead.is_set():
            self.die("stopped")

    def _born(self) -> None:
        self.lives += 1
        self.token = secrets.token_bytes(32)


class Stage:
    """A coordinator on inproc sockets, and the peers that a test puts around it.

    At the end it checks what must hold after any test: each handoff's invariants, and that every
    handoff that was ever opened has succeeded, failed, or is in flight.

    Attributes:
        virtual: whether time is virtual on this loop.
        bugs: what went wrong where nobody could be told, as the loop's handler heard of it.

    """

    _numbers = itertools.count()

    def __init__(self, settings: Config | None = None, hire: type[Worker] = StandInWorker) -> None:
        number = next(self._numbers)
        settings = settings or Config()
        # Config itself refuses inproc: no other process could connect.
        listen = Listen.model_construct(
            control=(f"inproc://control-{number}",), outcomes=(f"inproc://outcomes-{number}",), advertise=""
        )
        # The pools of these ranks are only numbers: nobody maps them.
        backend = settings.backend.model_copy(update={"hosting": "rank"})
        self.config = settings.model_copy(update={"listen": listen, "backend": backend})
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.service = Service(self.config, self.context, hire=hire)
        self.peers: list[Peer] = []
        self.virtual = False
        self.bugs: list[dict[str, object]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.virtual = getattr(loop, "looptime_on", False)
        loop.set_exception_handler(lambda _, context: self.bugs.append(context))
        await self.service.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            for peer in self.peers:
                peer.close()
            for crew in self.service.transfers.crews.values():
                if isinstance(crew.worker, StandInWorker):
                    crew.worker.immortal = False
            self.service.rooms.fail_all(
                set(self.service.rooms.active.values()), Reason.DRAINING, "the test is over"
            )
            await self.service.stop()

    def check(self) -> None:
        """Assert what holds at any moment."""
        assert not self.bugs, "nothing has raised where nobody could be told"
        rooms, counters = self.service.rooms, self.service.counters
        for handoff in [*rooms.active.values(), *rooms.unreleased]:
            handoff.machine.validate()
            assert handoff.machine.state.terminal == (handoff in rooms.unreleased)
        states = {handoff: handoff.machine.state for handoff in rooms.active.values()}
        assert set(rooms.past_prefill) == {h for h, state in states.items() if state is not State.OPEN}
        assert rooms.moving == sum(state is State.MOVING for state in states.values())
        over = counters.succeeded + sum(counters.failed.values())
        assert counters.opened == over + len(rooms.active), "opened = succeeded + failed + in flight"

    async def empty(self, bound_s: float = 20.0) -> None:
        """Wait until nothing is left of any handoff: no table has an entry."""
        end_s, pause_s = now_s() + bound_s, 0.01
        while left := self.left():
            assert now_s() < end_s, f"still left after {bound_s:g} s: {left}"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def left(self) -> dict[str, object]:
        """Every table that must be empty when no handoff is in flight and all engines have drained."""
        service = self.service
        groups = service.membership.groups.values()
        crews = service.transfers.crews.values()
        tables: dict[str, object] = {
            "active": service.rooms.active,
            "unreleased": service.rooms.unreleased,
            "offers": list(service.rooms._offers._seen),
            "flights": service.transfers.flights,
            "route flights": [route.name for c in crews for route in c.routes.values() if route.flights],
            "stalls": list(service.transfers._stalls._seen),
            "ladders": service.releases._waiting,
            "handoffs of groups": [group.name for group in groups if group.handoffs],
            "own pages": service.rooms.own_pages._held,
            "rooms to remember": service.rooms.endings._held,
            "verdicts to drain": {group.name: group.ended for group in groups if group.ended},
            "events to acknowledge": [group.name for group in groups if group.live and len(group.log)],
            "commands": [c.worker.name for c in crews if c.worker.identity and c.commands._items],
        }
        return {name: table for name, table in tables.items() if table}

    async def group(self, role: Role, name: str, world_size: int, **changes: object) -> list[RankPeer]:
        """Let a whole group join and be ready."""
        ranks = [RankPeer(self, role, name, number, world_size, **changes) for number in range(world_size)]
        for rank in ranks:
            await rank.join()
        await eventually_async(lambda: self.service.membership.groups[name].ready)
        return ranks

    def former(
        self, role: Role, name: str, number: int, world_size: int, memory: Memory | None, **changes: object
    ) -> RankPeer:
        """Let a rank of a former coordinator say hello; one without a memory is new."""
        epoch = 0 if memory is None else 99
        rank = RankPeer(self, role, name, number, world_size, epoch=epoch, memory=memory, **changes)
        rank.open()
        rank.send(rank.hello)
        return rank

    async def workers(self, *, auto: bool = True) -> list[WorkerPeer]:
        """Let a peer speak for every worker that has none."""
        found = []
        for crew in self.service.transfers.crews.values():
            if crew.worker.identity is None and not crew.worker.hopeless:
                peer = WorkerPeer(self, crew.worker, auto=auto)
                await peer.join()
                found.append(peer)
        return found

    async def pair(
        self, world_size: int = 1, *, auto: bool = True
    ) -> tuple[list[RankPeer], list[RankPeer], list[WorkerPeer]]:
        """A prefill group ``p``, a decode group ``d``, and the workers between them.

        Workers that are not on ``auto`` have connected, and forgotten the command to do so.
        """
        prefill = await self.group(Role.PREFILL, "p", world_size)
        decode = await self.group(Role.DECODE, "d", world_size)
        workers = await self.workers(auto=auto)
        for worker in workers:
            await worker.commanded()
            if not auto:
                worker.connect_all()
                worker.forget_commands()
        await turns()
        return prefill, decode, workers

    def member(self, rank: RankPeer) -> Rank:
        """What the coordinator knows of a rank."""
        member = self.service.membership.groups[rank.hello.group].ranks[rank.hello.rank]
        assert member is not None
        assert member.hello.instance == rank.hello.instance
        return member

    def died(self, rank: RankPeer) -> None:
        """Let the coordinator see that the process of a rank does not run any more."""
        rank.stop()
        self.service.membership._died(self.member(rank))

    def worker(self, rank: RankPeer) -> StandInWorker:
        """The worker of a prefill rank."""
        worker = self.service.transfers.crews[self.member(rank)].worker
        assert isinstance(worker, StandInWorker)
        return worker


class VirtualStage(Stage):
    """A stage whose time is virtual: on the standard loop, in a test marked ``virtual_time``."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        # The mark does nothing on uvloop, without a word.
        assert isinstance(loop, asyncio.SelectorEventLoop)
        assert isinstance(loop, LoopTimeEventLoop)
        assert loop.looptime_on
        return await super().__aenter__()
