"""A coordinator that can be killed, its workers, and ranks that find it again: on virtual time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Final, Self

from tests.faults.chaos.landing import Landing
from tests.faults.chaos.ranks import StormRank
from tests.faults.chaos.workers import StormStandIn, StormWorker
from tests.service.peers import LAYOUT, hello_of
from tests.service.stage import VirtualStage, config, now_s
from tests.support.faults.weather import Weather
from tests.support.logs import Captured
from tests.support.waiting import eventually_async

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from coordinator.layout import Layout
    from coordinator.messages import Role

_DRAIN_S: Final = 0.5
#: How long ZeroMQ takes to find a coordinator that has come back.
_FIND_S: Final = (0.02, 0.6)

SETTINGS: Final = config(
    handoff={"deadline_s": 15.0, "stall_s": 5.0, "offer_ttl_s": 20.0},
    peer={"connect_s": 5.0},
    rank={"heartbeat_s": 1.0, "lost_after_s": 5.0, "reattach_s": 3.0},
    release={"settle_s": 0.5, "drain_s": _DRAIN_S},
)


class Deployment:
    """Everything of one run; a context manager, which closes all of it.

    Attributes:
        random: whatever is drawn is drawn from it.
        stage: the coordinator that runs, if one does.
        incarnations: how many coordinators there have been.
        ranks: every life of every rank.
        log: the coordinators' log, and what is done to them.

    """

    def __init__(self, seed: int = 0, fails: float = 0.0) -> None:
        """``fails`` is the share of moves that fail."""
        self.seed = seed
        self.random = Random(seed)
        self.landing = Landing(self.random, _DRAIN_S)
        self.ranks: list[StormRank] = []
        self._fails = fails
        self.log = Captured()
        self.stage: VirtualStage | None = None
        self.incarnations = 0
        self.began_s = self._begun_s = now_s()
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    async def __aenter__(self) -> Self:
        self.spawn(self._staff())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self.ranks:
            rank.die()
        if self.stage is not None:
            await self.kill()

    def tell(self, what: str) -> None:
        """Note what happens."""
        self.log.append({"at_s": round(self.now_s(), 3), "event": "storm", "what": what})

    def now_s(self) -> float:
        """How long it has been going on."""
        return now_s() - self.began_s

    @property
    def up_s(self) -> float:
        """How long the coordinator has been there."""
        return now_s() - self._begun_s

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run something beside; what goes wrong in it is raised by the next ``until``."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_error)

    async def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait for something, on virtual time; raise what went wrong meanwhile."""

        def over() -> object:
            faults = [rank.conversation.standing.fault for rank in self.ranks if rank.alive]
            self._errors += [fault for fault in faults if fault is not None]
            return self._errors or condition()

        await eventually_async(over, timeout_s, what)
        if self._errors:
            raise self._errors[0]

    # --- the coordinator ---------------------------------------------------------------------

    async def begin(self, *, find: bool = True) -> VirtualStage:
        """Start a coordinator; every rank finds it in its own time, unless the test sees to that."""
        self.stage = stage = VirtualStage(SETTINGS, StormStandIn)
        await stage.__aenter__()
        # The same address for every incarnation, as it really is.
        stage.service.control.outcomes = {"inproc": "outcomes"}
        self.incarnations += 1
        self._begun_s = now_s()
        self.tell(f"coordinator {self.incarnations} starts")
        for rank in self.ranks:
            if find and rank.alive:
                self.find(rank, self.random.uniform(*_FIND_S))
        return stage

    async def kill(self) -> None:
        """SIGKILL the coordinator: no word to anybody, and its workers die with it."""
        assert self.stage is not None
        stage, self.stage = self.stage, None
        service = stage.service
        in_flight = len(service.rooms.active)
        self.tell(f"coordinator {self.incarnations} is killed with {in_flight} rooms in flight")
        stage.check()
        service._control.close()
        service._outcomes.close()
        for peer in stage.peers:
            peer.close()
        for handoff in [*service.rooms.active.values(), *service.rooms.unreleased]:
            handoff._task.cancel()
        for group in service.membership.groups.values():
            for member in group.ranks:
                if member is not None:
                    member.gone = True  # so that no clock waits for it
        for part in (service.reattach, service.rooms, service.membership, service.transfers):
            part.close()
        for task in service._tasks:
            task.cancel()
        await asyncio.gather(*service._tasks, return_exceptions=True)
        service._remove_files()
        for rank in self.ranks:
            if rank.alive:
                rank.disconnect()

    def find(self, rank: StormRank, after_s: float = 0.0) -> None:
        """Let a rank find the coordinator that runs now, if it still does then."""
        stage = self.stage

        def connect() -> None:
            if stage is not None and self.stage is stage:
                rank.connect(stage)

        asyncio.get_running_loop().call_later(after_s, connect)

    async def _staff(self) -> None:
        """Speak for every worker that has no voice."""
        while True:
            stage = self.stage
            crews = [] if stage is None else list(stage.service.transfers.crews.values())
            for crew in crews:
                worker = crew.worker
                assert stage is not None
                assert isinstance(worker, StormStandIn)
                if worker.voice is None:
                    StormWorker(stage, worker, self.random, self.landing, self._fails).introduce()
            await asyncio.sleep(0.05)

    # --- ranks -------------------------------------------------------------------------------

    def add(
        self,
        role: Role,
        group: str,
        number: int,
        world_size: int,
        weather: Weather[list[bytes]] | None = None,
        layout: Layout = LAYOUT,
    ) -> StormRank:
        """Start a rank; it finds the coordinator in its own time, if one runs."""
        instance = self.random.getrandbits(63) | 1
        ours = {"backend": SETTINGS.backend.name, "transport": "inproc", "instance": instance}
        said = hello_of(role, group, number, world_size, layout=layout, **ours)
        calm: Weather[list[bytes]] = Weather(0, lost=0.0, doubled=0.0, late=0.0)
        rank = StormRank(said, self.random, weather or calm)
        self.ranks.append(rank)
        self.find(rank, self.random.uniform(*_FIND_S))
        return rank

    def show_death(self, rank: StormRank) -> None:
        """Let the coordinator see that a rank's process does not run any more."""
        assert self.stage is not None
        membership = self.stage.service.membership
        group = membership.groups.get(rank.hello.group)
        member = group.ranks[rank.hello.rank] if group is not None else None
        if member is not None and member.hello.instance == rank.hello.instance:
            membership._died(member)

    def is_ready(self, group: str) -> bool:
        """Whether a group is ready at the coordinator that runs."""
        found = None if self.stage is None else self.stage.service.membership.groups.get(group)
        return found is not None and found.ready

    def _note_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._errors.append(task.exception() or RuntimeError())
