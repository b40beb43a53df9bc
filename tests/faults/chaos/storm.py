"""A coordinator that is killed, engines that lose ranks, and broadcasts in bad weather, on virtual time.

Everything is drawn from one seed. Two pairs of engines (TP 4 and TP 2) hand rooms over; the worst
happens in the first ``STORM_S``, then the weather clears up and everything must come to an end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from coordinator.messages import Role
from tests.faults.chaos.deployment import SETTINGS, Deployment
from tests.faults.chaos.engines import Engine, Use
from tests.faults.chaos.workers import StormStandIn
from tests.support.faults.weather import Weather

if TYPE_CHECKING:
    from tests.faults.chaos.ranks import StormRank

#: How long it lasts, in virtual seconds.
STORM_S: Final = 8.0
#: How long after it everything may take to end.
CALM_S: Final = 60.0
PAIRS: Final = (4, 2)
KILLS: Final = 2
ACCIDENTS_PER_S: Final = 0.7
_STEP_S: Final = 0.05
_USES_PER_S: Final = 4.0


class Storm(Deployment):
    """Everything that happens with one seed.

    Attributes:
        engines: by name.
        uses: what was submitted, by the pair's world size.

    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, fails=0.1)
        self.engines: dict[str, Engine] = {}
        self.uses: dict[int, list[Use]] = {size: [] for size in PAIRS}
        self._next_room = 1

    async def run(self) -> None:
        """Let everything happen, then wait until all is quiet."""
        await self._start()
        self.began_s += self.now_s()
        for engine in self.engines.values():
            self.spawn(self._step(engine))
        for size in PAIRS:
            self.spawn(self._route(size))
        self.spawn(self._kill_coordinators())
        self.spawn(self._restart_a_rank())
        self.spawn(self._have_accidents())
        await self.until(self._is_over, 3 * STORM_S, "the storm is over")
        for rank in self.ranks:
            rank.weather.clear_up()
        self.tell("the weather clears up")
        await self.until(self._is_settled, CALM_S, "nothing is left to happen")

    def _is_over(self) -> bool:
        return self.now_s() > STORM_S and self.stage is not None and self.incarnations == KILLS + 1

    def _is_settled(self) -> bool:
        if self.stage is None or any(not engine.idle for engine in self.engines.values()):
            return False
        heads = [
            {rank.conversation.inbox.have for rank in engine.ranks}
            | {rank.conversation.inbox.drained for rank in engine.ranks}
            for engine in self.engines.values()
        ]
        return all(len(head) == 1 for head in heads) and not self.stage.left()

    # --- what happens ------------------------------------------------------------------------

    async def _start(self) -> None:
        await self.begin()
        for role in Role:
            for size in PAIRS:
                name = f"{role.value}-{size}"
                engine = Engine(name, role, size, self.landing.check_quiet)
                engine.ranks += [self._new_rank(engine, number) for number in range(size)]
                self.engines[name] = engine
                await self.until(lambda name=name: self.is_ready(name), 10.0, f"{name} is ready")  # type: ignore[misc]

    async def _kill_coordinators(self) -> None:
        for at_s in sorted(self.random.uniform(0.5, STORM_S - 1.0) for _ in range(KILLS)):
            await asyncio.sleep(max(0.0, at_s - self.now_s()))
            await self.kill()
            await asyncio.sleep(self.random.uniform(0.05, 2.5))
            await self.begin()

    async def _restart_a_rank(self) -> None:
        await asyncio.sleep(self.random.uniform(0.5, STORM_S - 2.0))
        engine = self.random.choice(list(self.engines.values()))
        number = self.random.randrange(engine.world_size)
        old = engine.ranks[number]
        old.die()
        at_once = self.random.random() < 0.5
        self.tell(f"{old.name} dies; that is {'seen at once' if at_once else 'not seen'}")
        if at_once and self.stage is not None:
            self.show_death(old)
        await asyncio.sleep(self.random.uniform(0.05, 2.0))
        self.tell(f"{old.name} starts anew")
        engine.ranks[number] = self._new_rank(engine, number)

    async def _have_accidents(self) -> None:
        """Lines that are cut, processes that stand still, workers that die."""
        while True:
            await asyncio.sleep(self.random.expovariate(ACCIDENTS_PER_S))
            if self.now_s() > STORM_S:
                return
            rank = self.random.choice([rank for rank in self.ranks if rank.alive])
            accident = self.random.choices([self._cut, self._stop, self._end_a_worker], [6, 3, 2])[0]
            accident(rank)

    def _cut(self, rank: StormRank) -> None:
        if self.stage is not None:
            self.tell(f"the line of {rank.name} is cut")
            rank.disconnect()
            self.find(rank, self.random.uniform(0.0, 1.0))

    def _stop(self, rank: StormRank) -> None:
        if not rank.frozen:
            # A rank that stands still for longer than reattach_s while the coordinator starts anew has to
            # be started anew itself. Else it is lost after lost_after_s, and comes back.
            is_steady = self.incarnations == KILLS + 1 and self.up_s > SETTINGS.rank.reattach_s
            duration_s = self.random.uniform(0.2, 7.0 if is_steady else 2.0)
            self.tell(f"{rank.name} stands still for {duration_s:.1f} s")
            rank.freeze()
            asyncio.get_running_loop().call_later(duration_s, rank.thaw)

    def _end_a_worker(self, rank: StormRank) -> None:
        crews = [] if self.stage is None else list(self.stage.service.transfers.crews.values())
        crew = next((crew for crew in crews if crew.worker.rank.hello.instance == rank.hello.instance), None)
        if crew is not None and isinstance(crew.worker, StormStandIn):
            self.tell(f"the worker of {rank.name} dies")
            crew.worker.die()

    async def _step(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * _STEP_S)
            engine.step()

    def _new_rank(self, engine: Engine, number: int) -> StormRank:
        weather: Weather[list[bytes]] = Weather(self.random.getrandbits(64))
        return self.add(engine.role, engine.name, number, engine.world_size, weather)

    # --- the router --------------------------------------------------------------------------

    async def _route(self, size: int) -> None:
        """Give rooms to both engines of a pair."""
        prefill, decode = self.engines[f"prefill-{size}"], self.engines[f"decode-{size}"]
        while self.now_s() < STORM_S:
            await asyncio.sleep(self.random.expovariate(_USES_PER_S))
            use = self._use(size)
            self.uses[size].append(use)
            for engine in (prefill, decode):
                late_s = self.random.uniform(0.0, 0.3)
                asyncio.get_running_loop().call_later(late_s, engine.submit, use)

    def _use(self, size: int) -> Use:
        random = self.random
        room, generation = self._room()
        cancels = None
        if random.random() < 0.08:
            cancels = (random.choice(list(Role)), random.randrange(size), random.randint(0, 6))
        return Use(
            room, generation, random.randint(1, 6), random.randint(1, 4), random.random() < 0.5, cancels
        )

    def _room(self) -> tuple[int, int]:
        """A room that was never used, or one whose use both engines know to be over: any two engines."""
        if self.random.random() < 0.3:
            last: dict[int, tuple[int, int]] = {}
            for size, uses in self.uses.items():
                for use in uses:
                    last[use.room] = max(last.get(use.room, (0, 0)), (use.generation, size))
            over = [
                (room, generation)
                for room, (generation, size) in last.items()
                if all((room, generation) in self.engines[f"{role.value}-{size}"].outcomes for role in Role)
            ]
            if over:
                room, generation = self.random.choice(over)
                return room, generation + 1
        self._next_room += 1
        return self._next_room - 1, 0
