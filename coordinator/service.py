"""The wiring: sockets, groups, rooms, workers, and how all of it starts and ends."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

import zmq

from coordinator import addresses, sockets
from coordinator.broadcast import Broadcaster
from coordinator.channel import Channel
from coordinator.control import Control
from coordinator.logs import get_logger
from coordinator.membership import Membership
from coordinator.messages import Role
from coordinator.metrics import Counters
from coordinator.overview import Overview
from coordinator.pairing import pairing
from coordinator.private import PrivateDirectory
from coordinator.quarantine import Quarantine
from coordinator.reasons import Reason
from coordinator.reattach import Reattach
from coordinator.release import Releases
from coordinator.rooms import Rooms
from coordinator.transfers import Transfers
from coordinator.worker.hosted import HostedWorker
from coordinator.worker.settings import WorkerSettings
from coordinator.worker.supervisor import STOP_S, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zmq.auth.thread import ThreadAuthenticator

    from coordinator.config import Config
    from coordinator.groups import Group, Rank
    from coordinator.socket_files import SocketFile

#: After the last verdict: how long ranks get to acknowledge it before the coordinator ends.
FAREWELL_S: Final = 1.0

#: How long the workers may take to end, by force if they must.
WORKERS_S: Final = 2 * STOP_S

_log = get_logger()


class Service:
    """One coordinator. ``start`` it inside a running loop, ``stop`` it in the same."""

    def __init__(
        self,
        config: Config,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        hire: type[Worker] | None = None,
    ) -> None:
        """Wire the parts together; nothing is opened yet. ``hire`` makes the workers."""
        self.config = config
        self._hire = hire or (HostedWorker if config.backend.hosting == "rank" else Worker)
        self.epoch = secrets.randbits(63) | 1
        self.counters = Counters()
        self._context = context or zmq.Context.instance()
        self._router = sockets.router(self._context, config.limits)
        self._xpub = sockets.xpub(self._context, config.limits)
        self._outcomes = Channel(self._xpub, self._subscribed)
        self.broadcaster = Broadcaster(self.epoch, self._outcomes)
        self.transfers = Transfers(config, self._send, self.counters)
        self.releases = Releases(config.release, self.transfers, config.rank)
        self.rooms = Rooms(config, self.broadcaster, self.transfers, self.counters)
        self.membership = Membership(config, self.counters, self)
        self.control = Control(
            config, self.epoch, self.membership, self.rooms, self.transfers, self.broadcaster, self.counters
        )
        self._control = self.control.channel = Channel(self._router, self.control.on_message)
        self.reattach = self.control.reattach = Reattach(
            config, self.membership, self.rooms, self.transfers, self.control.answer_hello
        )
        self.control.lodging = self.reattach.pages.lodging = issubclass(self._hire, HostedWorker)
        self.rooms.met = self.reattach.former.judge
        self.rooms.release = self.reattach.pages.release
        self.transfers.confirm_alive = self.membership.confirm_alive
        self.rooms.releases = self.releases
        self.quarantine = self.rooms.quarantine = Quarantine(self._quarantine_budget)
        self.releases.quarantine = self.quarantine
        self.rooms.overflowed = self.membership.lag
        self.overview = Overview(
            config, self.epoch, self.counters, self.rooms, self.membership, self.transfers, self.quarantine
        )
        self.addresses: list[str] = []
        self._files: list[SocketFile] = []
        self._private: PrivateDirectory | None = None
        self._workers_address = ""
        self._authenticator: ThreadAuthenticator | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    # Start and end

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: an address or a key cannot be used, or there is no room for temporary files.

        """
        listen = self.config.listen
        self._private = PrivateDirectory()
        # Before any key is demanded: this one is in a directory of our own, for our own workers.
        self._workers_address = self._bind(self._router, f"ipc://{self._private.path}/workers", "workers")
        if self.config.security is not None:
            self._authenticator = sockets.authenticate(
                self._context, self.config.security, [self._router, self._xpub]
            )
            self.overview.parts["the authenticator of clients"] = self._authenticator.is_alive
        self.addresses = [self._bind(self._router, address, "listen.control") for address in listen.control]
        for address in listen.outcomes:
            bound = self._bind(self._xpub, address, "listen.outcomes")
            kind = addresses.transport(bound)
            shown = addresses.advertised(bound, listen.advertise) if kind == "tcp" else bound
            self.control.outcomes.setdefault(kind, shown)
        self.reattach.start()
        self._control.start()
        self._outcomes.start()
        self.run_for_ever("the heartbeat of the broadcasts", self.broadcaster.beat(self.membership.groups))
        _log.info(
            "coordinator.ready",
            name=self.config.service.name,
            epoch=f"{self.epoch:x}",
            control=self.addresses,
            outcomes=list(self.control.outcomes.values()),
            backend=self.config.backend.name,
        )

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Admit no more handoffs; let those in flight end within ``grace_s``, or until ``hurry``."""
        self.rooms.draining = True
        _log.info("coordinator.draining", in_flight=len(self.rooms.active), grace_s=grace_s)
        await self._until(lambda: not self.rooms.active or hurry.is_set(), grace_s)
        self.rooms.fail_all(
            set(self.rooms.active.values()), Reason.DRAINING, "the coordinator is shutting down"
        )
        release = self.config.release
        bound_s = 2 * release.settle_s + release.drain_s + 1.0
        await self._until(lambda: not self.rooms.unreleased or hurry.is_set(), bound_s)
        groups = self.membership.groups
        await self._until(
            lambda: (
                hurry.is_set()
                or all(group.stable == group.log.head or not group.live for group in groups.values())
            ),
            FAREWELL_S,
        )

    async def stop(self) -> None:
        """Close everything. Handoffs that are still in flight are left without a verdict."""
        self._closing = True
        self.reattach.close()
        self.rooms.close()
        self.membership.close()
        await self._stop_workers()
        self.transfers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._control.close()
        self._outcomes.close()
        if self._authenticator is not None:
            sockets.stop_authenticating(self._authenticator)
        self._remove_files()
        _log.info(
            "coordinator.stopped", opened=self.counters.opened, succeeded=self.counters.succeeded,
            failed=dict(self.counters.failed),
        )  # fmt: skip

    def reconfigure(self, config: Config) -> None:
        """Use the bounds and limits of another configuration from now on (see ``coordinator.reload``)."""
        self.config = self.overview.config = config
        self.rooms.reconfigure(config)
        self.transfers.reconfigure(config)
        self.membership.reconfigure(config)
        self.reattach.reconfigure(config)
        self.releases.reconfigure(config.release)
        self.quarantine.judge()

    def run_for_ever(self, what: str, work: Coroutine[object, object, None]) -> None:
        """Run what must not end before the coordinator does; health turns red when it does (case C54)."""
        self._spawn(work).add_done_callback(lambda task: self._ended(what, task))

    # What happens to ranks (see ``coordinator.membership.MembershipEvents``)

    def joined(self, rank: Rank) -> None:
        """Give a prefill rank its worker; open the ways between it and the other side."""
        if rank.group.moves_itself:
            return
        if rank.group.role is Role.PREFILL and rank not in self.transfers.crews:
            worker = self._hire(rank, lambda token: self._worker_settings(rank, token), self)
            self.transfers.enlist(worker)
            worker.start()
        for prefill, decode, leg in self._legs_of(rank):
            source, target = prefill.ranks[leg[0]], decode.ranks[leg[1]]
            if source is not None and target is not None and source.alive and target.alive:
                self.transfers.routes.open(source, target)

    def lost(self, rank: Rank, reason: Reason, message: str) -> None:
        """Fail the handoffs of a rank's group."""
        self.control.forget(rank)
        self.rooms.fail_all(rank.group.handoffs, reason, message, rank.name)
        if rank.group.role is Role.DECODE:
            self.transfers.routes.rank_lost(rank)
        self.control.note(rank.group)

    def gone(self, rank: Rank) -> None:
        """Nothing lands in a dead decode rank; a dead prefill rank needs no worker."""
        if rank.group.moves_itself:
            self.rooms.own_pages.dead(rank)
        elif rank.group.role is Role.DECODE:
            self.transfers.rank_gone(rank)
        elif rank in self.transfers.crews:
            self._spawn(self._dismiss(rank))
            return  # Then what runs in its process is still to be waited for.
        self.membership.unwatch(rank)

    def forgotten(self, rank: Rank) -> None:
        """Keep no link to a rank that did not come back, and no worker for it, unless it still moves."""
        if rank.group.role is Role.DECODE:
            self.transfers.routes.forget(rank)
        elif rank in self.transfers.crews and not (self._lodges(rank) and self.transfers.moves(rank)):
            self._spawn(self._dismiss(rank))

    def died(self, rank: Rank) -> None:
        """What ran in a rank's process has ended with it."""
        crew = self.transfers.crews.get(rank)
        if crew is not None and isinstance(crew.worker, HostedWorker):
            crew.worker.ended(f"the process of {rank.name} died")

    def moved(self, rank: Rank) -> None:
        """Write to where a decode rank's memory can be reached now."""
        self.transfers.routes.rank_moved(rank)

    def worker_down(self, worker: Worker, cause: str) -> None:
        """Fail the moves of a worker that died, or never came."""
        if worker.lives:  # Else it was waited for in vain.
            self.counters.worker_deaths += 1
        self.control.forget(worker)
        self.transfers.worker_down(worker, cause)

    # Helpers

    def _legs_of(self, rank: Rank) -> list[tuple[Group, Group, tuple[int, int]]]:
        """The legs between a rank and every group of the other side that fits."""
        found = []
        for other in self.membership.groups.values():
            if other.role is rank.group.role:
                continue
            is_prefill = rank.group.role is Role.PREFILL
            prefill, decode = (rank.group, other) if is_prefill else (other, rank.group)
            pair = pairing(prefill.layout, prefill.world_size, decode.layout, decode.world_size)
            if not isinstance(pair, str):
                legs = pair.by_source if is_prefill else pair.by_destination
                found += [(prefill, decode, leg) for leg in legs[rank.number]]
        return found

    async def _dismiss(self, rank: Rank) -> None:
        crew = self.transfers.crews[rank]
        if not self._lodges(rank):
            await crew.worker.retire(f"{rank.name} is dead")
        else:
            # Its process may live although its place is taken; then it answers.
            crew.commands.stop()
            if self.transfers.moves(rank):
                await crew.worker.retire(f"{rank.name} is gone")
        self.transfers.dismiss(rank)
        self.membership.unwatch(rank)
        if rank.alive:
            self.joined(rank)  # It came back meanwhile: it needs another one.

    def _lodges(self, rank: Rank) -> bool:
        """Whether a rank's worker runs in the rank's own process."""
        return isinstance(self.transfers.crews[rank].worker, HostedWorker)

    def _quarantine_budget(self) -> int:
        """What is configured, or a tenth of the pools that are sent from; in bytes."""
        configured = self.config.release.quarantine_bytes
        if configured is not None:
            return configured
        pools = [crew.worker.rank.hello.pool.size_bytes for crew in self.transfers.crews.values()]
        return sum(pools) // 10

    def _worker_settings(self, rank: Rank, token: str) -> WorkerSettings:
        hello = rank.hello
        return WorkerSettings(
            control=self._workers_address,
            token=token,
            label=f"{rank.group.name}-{rank.number}-{token[:8]}",
            backend=self.config.backend.name,
            options=self.config.backend.chosen_options,
            pool=hello.pool,
            layout=hello.layout,
            world_size=hello.world_size,
            rank=hello.rank,
            heartbeat_s=self.config.rank.heartbeat_s,
            instance=hello.instance,
        )

    async def _stop_workers(self) -> None:
        """End all workers; one that hangs in the kernel, where no signal reaches it, is left behind."""
        stops = {
            asyncio.ensure_future(crew.worker.stop()): crew.worker for crew in self.transfers.crews.values()
        }
        if not stops:
            return
        _, stuck = await asyncio.wait(stops, timeout=WORKERS_S)
        for stop in stuck:
            stop.cancel()
            _log.error("worker.left_behind", rank=stops[stop].rank.name)

    def _remove_files(self) -> None:
        for file in self._files:
            file.remove()
        self._files.clear()
        if self._private is not None:
            self._private.remove()

    def _bind(self, socket: zmq.Socket[bytes], address: str, key: str) -> str:
        return sockets.bind(socket, address, key, self._files)

    def _send(self, frames: list[bytes]) -> bool:
        return self._control.send(frames)

    def _subscribed(self, frames: list[bytes]) -> None:
        """A rank has subscribed: let it see a broadcast at once."""
        topic = frames[0]
        if topic[:1] != b"\x01":
            return
        for group in self.membership.groups.values():
            if group.topic == topic[1:]:
                self.broadcaster.publish(group)

    async def _until(self, condition: Callable[[], bool], bound_s: float) -> None:
        deadline_s = asyncio.get_running_loop().time() + bound_s
        # Only while ending: what is waited for has no one event of its own.
        while not condition() and asyncio.get_running_loop().time() < deadline_s:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        if not self._closing:
            error = None if task.cancelled() else task.exception()
            self.counters.bugs += 1
            self.overview.broken[what] = repr(error)
            _log.error("coordinator.broken", what=what, exc_info=error)
