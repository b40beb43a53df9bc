"""Workers of the storm: moves take their time, some fail, and bytes may land for a while after that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coordinator.messages import (
    VERSION,
    Commands,
    Connected,
    ConnectPeer,
    Fenced,
    FencePeer,
    Move,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Report,
    Revoke,
    WorkerHello,
    decode_to_worker,
)
from tests.service.peers import WorkerPeer
from tests.service.stage import StandInWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from coordinator.messages import Command
    from tests.faults.chaos.landing import Landing
    from tests.service.stage import Stage


class StormStandIn(StandInWorker):
    """The coordinator's side of a worker, whose death the test's side notices at once."""

    voice: StormWorker | None = None

    def die(self, cause: str = "killed by signal 11", *, hopeless: bool = False) -> None:
        voice, self.voice = self.voice, None
        if voice is not None:
            voice.die()
        super().die(cause, hopeless=hopeless)


class StormWorker(WorkerPeer):
    """One life of one worker."""

    def __init__(
        self, stage: Stage, worker: StormStandIn, random: Random, landing: Landing, fails: float
    ) -> None:
        """``fails`` is the share of moves that do, half of them without being settled at once."""
        super().__init__(stage, worker, auto=False)
        self._fails = fails
        worker.voice = self
        self._random = random
        self._landing = landing
        self._source = worker.rank.peer
        self._moving: dict[int, tuple[Move, asyncio.TimerHandle]] = {}
        self._failed: set[int] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    def introduce(self) -> None:
        """Say hello; what it is told comes later."""
        self.open()
        self.send(WorkerHello(VERSION, self.worker.token, 1, self.lands_after_settled))

    def on_frames(self, frames: list[bytes]) -> None:
        message = decode_to_worker(frames[0])
        if isinstance(message, Commands):
            for command in message.items:
                self._obey(command)

    def die(self) -> None:
        """Be gone; what it was writing may still land for a while."""
        for move, timer in self._moving.values():
            timer.cancel()
            self._landing.ends(self._source, move, lands=True)
        for timer in self._timers:
            timer.cancel()
        self._moving.clear()
        super().close()

    def close(self) -> None:
        self.die()

    def _obey(self, command: Command) -> None:
        match command:
            case ConnectPeer():
                self._later(self._random.uniform(0.0, 0.1), Connected(command.peer, 0.01))
            case Move():
                self._begin(command)
            case Revoke():
                for number in command.moves:
                    if number in self._moving and number not in self._failed and self._random.random() < 0.5:
                        self._end(number, MoveFailed(number, "revoked", "not posted", True, False))  # noqa: FBT003 - fields
            case FencePeer():
                for number in [n for n, (move, _) in self._moving.items() if move.peer == command.peer]:
                    fenced = MoveFailed(number, "transport", "fenced", True, True)  # noqa: FBT003 - fields
                    self._end(number, MoveSettled(number) if number in self._failed else fenced)
                self.report(Fenced(command.peer))

    def _begin(self, move: Move) -> None:
        self._landing.begins(self._source, move)
        drawn, number = self._random.random(), move.move
        report: Report
        if drawn >= self._fails:
            report = MoveDone(number, len(move.source_pages) * 64, 0.01)
        elif drawn >= self._fails / 2:
            report = MoveFailed(number, "transport", "as the storm says", True, True)  # noqa: FBT003 - fields
        else:
            report = MoveFailed(number, "transport", "as the storm says", False, True)  # noqa: FBT003 - fields
        takes_s = self._random.expovariate(8.0)
        self._moving[number] = (move, self._call(takes_s, lambda: self._end(number, report)))

    def _end(self, number: int, report: Report) -> None:
        move, timer = self._moving[number]
        timer.cancel()
        self.report(report)
        if isinstance(report, MoveFailed) and not report.settled:
            self._failed.add(number)
            takes_s = self._random.uniform(0.0, 1.0)
            settled = self._call(takes_s, lambda: self._end(number, MoveSettled(number)))
            self._moving[number] = (move, settled)
            return
        del self._moving[number]
        posted = isinstance(report, MoveSettled) or (isinstance(report, MoveFailed) and report.started)
        self._landing.ends(self._source, move, lands=posted)

    def _later(self, after_s: float, report: Report) -> None:
        self._call(after_s, lambda: self.report(report))

    def _call(self, after_s: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.get_running_loop().call_later(after_s, work)
        self._timers.add(timer)
        return timer
