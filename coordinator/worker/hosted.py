"""A worker in its rank's own process, as the coordinator sees it: told what to do, and believed.

``Welcome`` tells the rank its worker's secret and settings. It can have several lives, one after the
other: whenever its line breaks, it fences all its links and introduces itself anew. Nobody can
kill it. So what it had is quiet when it says so, when it begins its next life, or when the kernel says
that its process has ended; and until then it is not.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from coordinator.logs import get_logger
from coordinator.messages import WorkerOrders
from coordinator.worker.supervisor import START_S, Worker, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.groups import Rank
    from coordinator.worker.settings import WorkerSettings
    from coordinator.worker.supervisor import WorkerEvents

_log = get_logger()


class HostedWorker(Worker):
    """The worker of one prefill rank, run by that rank."""

    def __init__(self, rank: Rank, settings: Callable[[str], WorkerSettings], events: WorkerEvents) -> None:
        """See ``Worker``."""
        super().__init__(rank, settings, events)
        self._quiet = asyncio.Event()
        self._overdue_timer: asyncio.TimerHandle | None = None

    @property
    def orders(self) -> WorkerOrders | None:
        """See ``Worker.orders``."""
        settings = self._settings(self.token.hex())
        return WorkerOrders(
            self.token, settings.label, settings.backend, settings.options, settings.heartbeat_s
        )

    def start(self) -> None:
        """Have a secret, and wait for who knows it."""
        self.token = secrets.token_bytes(32)
        self._overdue_timer = asyncio.get_running_loop().call_later(START_S, self._give_up)

    def up(self, identity: bytes, *, lands_after_settled: bool) -> None:
        """Note that a life has introduced itself: all that a former one had is quiet."""
        if self.lives and not self._quiet.is_set():
            self._events.worker_down(self, "its line broke, and it has begun anew")
        self.lives += 1
        self._quiet.clear()
        super().up(identity, lands_after_settled=lands_after_settled)

    def ended(self, why: str) -> None:
        """Nothing moves on its account any more, and it does not run; another life may follow."""
        if self.state is not WorkerState.STOPPED:
            self.state = WorkerState.DOWN
            _log.warning("worker.ended", rank=self.rank.name, life=self.lives, cause=why)
        self.hopeless = True
        self.trouble = why
        # Once for each life: since it was hopeless it has been given nothing.
        if not self._quiet.is_set():
            self._events.worker_down(self, why)
        self.identity = None
        self._quiet.set()

    def kill(self, why: str) -> None:
        """Say that this cannot be done: its process is an engine's."""
        _log.error("worker.not_killed", rank=self.rank.name, why=why)

    def unheard(self, why: str) -> None:
        """Hear it no more: refused, it fences all its links and begins anew."""
        _log.error("worker.unheard", rank=self.rank.name, why=why)
        self.identity = None
        self.state = WorkerState.DOWN
        self.trouble = why

    async def retire(self, why: str) -> None:
        """Wait until nothing moves on its account any more; perhaps for ever."""
        if not self.lives and not self._quiet.is_set():
            self.ended(why)
        await self._quiet.wait()

    async def stop(self) -> None:
        """Forget it. Its rank lives on, and sees to it that nothing moves any more."""
        self.state = WorkerState.STOPPED
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()

    def _give_up(self) -> None:
        """Let nobody wait for a worker that does not come. It is welcome later."""
        if not self.lives and not self.hopeless:
            self.ended(f"did not introduce itself within {START_S:g} s")
