"""What a simulated rank is told when it starts, and how it is started."""

from __future__ import annotations

import msgspec

from coordinator.layout import Layout
from coordinator.messages import Role
from coordinator.sim.engine import Sabotage


class RankSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank.

    Attributes:
        role: prefill or decode.
        group: name of its engine.
        rank: its number.
        world_size: ranks in its engine.
        control: address of the coordinator.
        reports: address of the driver.
        directory: where sockets lie; short, for paths of sockets are.
        backend: name of the transfer backend.
        private: its pool is memory that no other process can map.
        layout: of its pool.
        pages: in its pool.
        incarnation: how often its engine was started, itself included.
        options: the backend's own settings.
        step_s: how long a step takes at least in which something is computed.
        ready_timeout_s: bound of the start, until all ranks of the engine are there.
        step_timeout_s: bound of the silence between ranks.
        sabotage: a fault to build into one rank, to prove that it is found.
        sabotage_rank: into which one.
        program: the module whose ``run`` is the rank; another one brings engines of its own.

    """

    role: Role
    group: str
    rank: int
    world_size: int
    control: str
    reports: str
    directory: str
    backend: str
    layout: Layout
    pages: int
    incarnation: int = 1
    private: bool = False
    options: dict[str, str | int | float | bool] = {}
    step_s: float = 0.002
    ready_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    sabotage: Sabotage = Sabotage.NONE
    sabotage_rank: int = 0
    program: str = "coordinator.sim.rank"

    @property
    def label(self) -> str:
        """The rank's name for people, and for the driver's socket."""
        return f"{self.group}#{self.incarnation}/{self.rank}"


class Fork(msgspec.Struct, frozen=True):
    """To the fork server: start a rank, with this file for its output and this environment."""

    log: str
    environment: dict[str, str]
    settings: RankSettings


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """From the fork server: the answer to a ``Fork``."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From the fork server: a rank has ended; ``code`` is its exit status, negative for a signal."""

    pid: int
    code: int
