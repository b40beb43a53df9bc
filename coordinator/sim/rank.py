"""The process of one simulated rank, which the fork server has started.

Rank 0 decides the steps, the others follow. It ends when its engine is told to, or when something fails.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import zmq

from backends.base import BackendError
from coordinator.client import DecodeRank, Endpoint, KVPool, PrefillRank
from coordinator.errors import CoordinatorError
from coordinator.messages import Role
from coordinator.sim.decode import DecodeEngine
from coordinator.sim.engine import Sabotage
from coordinator.sim.errors import SimulationError
from coordinator.sim.lockstep import HEARTBEAT_S, StepReceiver, StepSender, step_address
from coordinator.sim.pattern import sections_of
from coordinator.sim.prefill import PrefillEngine
from coordinator.sim.wire import Cancel, Finish, Ready, Reports, Step, Submit, decode_command, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.sim.decode import DecodeClient
    from coordinator.sim.engine import Engine
    from coordinator.sim.pattern import Section
    from coordinator.sim.prefill import PrefillClient
    from coordinator.sim.settings import RankSettings
    from coordinator.sim.wire import Command, Report

_LINGER_S: Final = 5.0
_MAX_COMMANDS: Final = 64


class Mailbox:
    """The rank's connection to the driver."""

    def __init__(self, settings: RankSettings) -> None:
        """Connect."""
        self._settings = settings
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, settings.label.encode())
        self.socket.set(zmq.SNDTIMEO, round(settings.step_timeout_s * 1000))
        self.socket.connect(settings.reports)

    def report(self, items: list[Report]) -> None:
        """Tell the driver.

        Raises:
            SimulationError: it takes nothing any more.

        """
        if not items:
            return
        reports = Reports(self._settings.group, self._settings.rank, self._settings.incarnation, items)
        try:
            self.socket.send(encode(reports))
        except zmq.Again:
            message = f"the driver has taken no report for {self._settings.step_timeout_s:g} s"
            raise SimulationError(message) from None

    def commands(self) -> list[Command]:
        """Take what the driver has sent, without waiting."""
        commands: list[Command] = []
        while len(commands) < _MAX_COMMANDS:
            try:
                commands.append(decode_command(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return commands

    def close(self) -> None:
        """Hand over what is still to be told, within a bound."""
        self._context.destroy(round(_LINGER_S * 1000))


@dataclass(frozen=True, slots=True)
class Engines:
    """Who plays the two roles."""

    prefill: Callable[[PrefillClient, list[Section], int, Sabotage], Engine] = PrefillEngine
    decode: Callable[[DecodeClient, list[Section], Sabotage], Engine] = DecodeEngine


def run(settings: RankSettings, engines: Engines = Engines()) -> int:
    """Run one rank; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        with ExitStack() as cleanup:
            _run(settings, engines, cleanup)
    except (CoordinatorError, BackendError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _run(settings: RankSettings, engines: Engines, cleanup: ExitStack) -> None:
    began_s = time.monotonic()
    mailbox = Mailbox(settings)
    cleanup.callback(mailbox.close)
    follower = None
    if settings.rank:
        address = step_address(settings.directory, settings.group, settings.rank)
        follower = cleanup.enter_context(StepReceiver(address, settings.step_timeout_s))
    pool = cleanup.enter_context(_make_pool(settings))
    engine, client = _connect(settings, engines, pool, cleanup)
    client.wait_ready(settings.ready_timeout_s)
    mailbox.report([Ready(os.getpid(), pool.path, pool.size_bytes, time.monotonic() - began_s)])
    if follower is None:
        addresses = [
            step_address(settings.directory, settings.group, rank) for rank in range(1, settings.world_size)
        ]
        sender = cleanup.enter_context(StepSender(addresses, settings.step_timeout_s))
        _lead(engine, client, mailbox, sender, settings.step_s)
    else:
        _follow(engine, mailbox, follower)


def _make_pool(settings: RankSettings) -> KVPool:
    layout, world_size, rank = settings.layout, settings.world_size, settings.rank
    if not settings.private:
        return KVPool.allocate(layout, settings.pages, world_size, rank=rank)
    import torch  # noqa: PLC0415 - takes seconds, and only memory of an engine's own needs it

    memory = torch.zeros(layout.pool_bytes(settings.pages, world_size, rank), dtype=torch.uint8)
    return KVPool.wrap([memory], layout, world_size, rank=rank)


def _connect(
    settings: RankSettings, engines: Engines, pool: KVPool, cleanup: ExitStack
) -> tuple[Engine, PrefillRank | DecodeRank]:
    sections = sections_of(pool.arrays, settings.layout, settings.world_size, settings.rank, settings.pages)
    sabotage = settings.sabotage if settings.rank == settings.sabotage_rank else Sabotage.NONE
    if settings.role is Role.PREFILL:
        prefill = PrefillRank.connect(
            settings.control,
            group=settings.group,
            rank=settings.rank,
            world_size=settings.world_size,
            pool=pool,
        )
        cleanup.callback(prefill.close)
        return engines.prefill(prefill, sections, settings.rank, sabotage), prefill
    endpoint = cleanup.enter_context(Endpoint(pool, settings.backend, settings.options))
    decode = DecodeRank.connect(
        settings.control,
        group=settings.group,
        rank=settings.rank,
        world_size=settings.world_size,
        endpoint=endpoint,
    )
    cleanup.callback(decode.close)
    return engines.decode(decode, sections, sabotage), decode


def _lead(
    engine: Engine,
    client: PrefillRank | DecodeRank,
    mailbox: Mailbox,
    sender: StepSender,
    step_s: float,
) -> None:
    """Make a step whenever there is something to do, until the last one."""
    poller = zmq.Poller()
    poller.register(mailbox.socket, zmq.POLLIN)
    poller.register(client.fileno(), zmq.POLLIN)
    number, stepped_s = 0, time.monotonic()
    while True:
        if engine.busy:
            # A forward pass: nothing is looked at before it is over.
            time.sleep(max(0.0, stepped_s + step_s - time.monotonic()))
        timeout_s = 0.0 if engine.busy else max(0.0, stepped_s + HEARTBEAT_S - time.monotonic())
        poller.poll(round(timeout_s * 1000))
        number, stepped_s = number + 1, time.monotonic()
        step = _make_step(number, client.head, mailbox.commands())
        sender.send(step)
        mailbox.report(engine.apply(step))
        if step.last:
            return


def _make_step(number: int, head: bytes, commands: list[Command]) -> Step:
    step = Step(number, head)
    for command in commands:
        match command:
            case Submit(requests=requests):
                step.requests.extend(requests)
            case Cancel(rooms=rooms, why=why):
                step.cancels.extend((room, why) for room in rooms)
            case Finish():
                return Step(number, head, step.requests, step.cancels, last=True)
    return step


def _follow(engine: Engine, mailbox: Mailbox, receiver: StepReceiver) -> None:
    """Apply rank 0's steps, until the last one."""
    while True:
        step = receiver.receive()
        mailbox.report(engine.apply(step))
        if step.last:
            return
