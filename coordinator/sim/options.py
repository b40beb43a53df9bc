"""How a simulated deployment is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.sim.engine import Sabotage


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How a deployment is built.

    Attributes:
        backend: name of the transfer backend.
        hosting: who runs the workers: the ``coordinator``, or each prefill ``rank`` its own, over
            memory that no other process can map.
        layout: of every pool, unless an engine is added with another one.
        pages: in every rank's pool.
        step_s: how long a step takes at least in which something is computed.
        ready_timeout_s: bound of the start.
        step_timeout_s: bound of the silence within an engine.
        coordinator: settings of the coordinator, by table of its TOML file, over the demo's own.
        options: the backend's settings, for ranks and workers.
        environment: variables for all processes, over those of this one.
        sabotage: faults to build in, by group name; each in the group's last rank.
        program: the module whose ``run`` is a rank.

    """

    backend: str = "loopback"
    hosting: str = "coordinator"
    layout: Layout = field(default_factory=lambda: small_layout(2))
    pages: int = 512
    step_s: float = 0.002
    ready_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    coordinator: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sabotage: Mapping[str, Sabotage] = field(default_factory=dict)
    program: str = "coordinator.sim.rank"


def small_layout(*world_sizes: int) -> Layout:
    """Lay out pages of 16 KiB (8 planes of 2 KiB) on each rank of the largest of such engines.

    512 of them are 8 MiB: four ranks fit into the 64 MiB of shared memory that a container has.
    """
    return Layout(layers=4, page_tokens=16, kv_heads=math.lcm(*world_sizes), head_size=64, dtype="bfloat16")
