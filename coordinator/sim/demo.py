"""``kv-coordinator demo``: pages travel, decode is killed and comes back, and nothing is stuck."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from backends import registry
from backends.base import BackendUnavailableError
from backends.memory import SHM_DIRECTORY
from coordinator import presets
from coordinator.errors import ConfigError, LayoutError
from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.display import Display, show
from coordinator.sim.drive import Drive, DriveOptions
from coordinator.sim.errors import SimulationError
from coordinator.sim.files import why_not_writable
from coordinator.sim.interrupt import interruptible
from coordinator.sim.options import ClusterOptions, small_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from coordinator.layout import Layout
    from coordinator.sim.engine import Sabotage
    from coordinator.sim.summary import Summary

_ALL_IS_WELL: Final = 0
_FAILED: Final = 1
_UNUSABLE: Final = 2
_INTERRUPTED: Final = 130
#: Pages of a pool: at most so many and, unless that is too few, at most so many bytes.
_MOST_PAGES: Final = 512
_FEWEST_PAGES: Final = 16
_POOL_BYTES: Final = 64 << 20
#: One is over before the kill, one is caught by it, and one must succeed after it.
_FEWEST_HANDOFFS: Final = 3


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose.

    Attributes:
        backend: what moves the pages.
        prefill_tp: ranks of the prefill engine.
        decode_tp: ranks of the decode engine.
        layout: name or file of a layout, see ``coordinator.presets``; empty: a small one of our own.
        handoffs: how many requests are handed over.
        kill_coordinator: kill the coordinator in the middle, instead of decode.
        json_path: where the result is written as JSON, too.
        hosting: who runs the workers, the ``coordinator`` or each prefill ``rank`` its own.
        settle_s: bound of every wait for handoffs.
        sabotage: faults to build in, by group name, to prove that the demo can fail.

    """

    backend: str = "nixl"
    prefill_tp: int = 2
    decode_tp: int = 2
    layout: str = ""
    handoffs: int = 200
    kill_coordinator: bool = False
    json_path: Path | None = None
    hosting: str = "coordinator"
    settle_s: float = 60.0
    sabotage: Mapping[str, Sabotage] = field(default_factory=dict)


def run(options: DemoOptions) -> int:
    """Show it; returns the exit code.

    0: all is well. 1: a page is corrupt, a handoff is unresolved, ranks disagree, or a process
    failed. 2: what was asked for cannot be done. 130: interrupted.
    """
    console = Console()
    refusal = _refusal(options)
    if refusal:
        console.print(refusal, highlight=False, soft_wrap=True, markup=False)
        return _UNUSABLE
    try:
        with interruptible():
            summary = _drive(options, console)
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started is gone.")
        return _INTERRUPTED
    except SimulationError as error:
        console.print(f"The demo could not run: {error}", highlight=False, soft_wrap=True, markup=False)
        return _FAILED
    show(console, summary)
    if options.json_path is not None:
        options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(summary.as_json())) + b"\n")
    return _ALL_IS_WELL if summary.ok else _FAILED


def _refusal(options: DemoOptions) -> str:
    """Say in a sentence why this cannot be shown; empty when it can."""
    problem = "" if options.json_path is None else why_not_writable(options.json_path)
    if problem:
        return f"The result cannot be written to {options.json_path}: {problem}."
    if options.handoffs < _FEWEST_HANDOFFS:
        return f"{options.handoffs} handoffs show nothing: at least {_FEWEST_HANDOFFS} are needed."
    try:
        registry.load(options.backend)
        _layout(options)
    except (BackendUnavailableError, ConfigError, LayoutError) as error:
        return f"{error}."
    return ""


def _layout(options: DemoOptions) -> Layout:
    """Choose the layout of both engines.

    Raises:
        ConfigError: there is no such layout.
        LayoutError: it is impossible for one of them.

    """
    if not options.layout:
        return small_layout(options.prefill_tp, options.decode_tp)
    layout = presets.load(options.layout)
    for side, world_size in (("prefill", options.prefill_tp), ("decode", options.decode_tp)):
        try:
            layout.check(world_size)
        except LayoutError as error:
            message = f"The layout {options.layout} is impossible for {side}: {error}"
            raise LayoutError(message) from error
    return layout


def _pages(options: DemoOptions, layout: Layout) -> int:
    """Choose how many pages each pool has: as many as are small enough for a demo.

    Raises:
        SimulationError: there is not enough shared memory for the fewest that make sense.

    """
    worlds = (options.prefill_tp, options.decode_tp)
    page_bytes = [layout.pool_bytes(1, world, rank) for world in worlds for rank in range(world)]
    found = os.statvfs(SHM_DIRECTORY)
    free_bytes = found.f_bavail * found.f_frsize
    # A little is left for others.
    pages = min(_MOST_PAGES, max(_FEWEST_PAGES, _POOL_BYTES // max(page_bytes)))
    pages = min(pages, free_bytes * 9 // 10 // sum(page_bytes))
    if pages < _FEWEST_PAGES:
        message = (
            f"{SHM_DIRECTORY} has {free_bytes} bytes free, {_FEWEST_PAGES} pages of {len(page_bytes)} ranks "
            f"take {_FEWEST_PAGES * sum(page_bytes)}; choose a smaller layout or fewer ranks"
        )
        raise SimulationError(message)
    return pages


def _drive(options: DemoOptions, console: Console) -> Summary:
    layout = _layout(options)
    cluster_options = ClusterOptions(
        backend=options.backend,
        hosting=options.hosting,
        layout=layout,
        pages=_pages(options, layout),
        sabotage=options.sabotage,
        # Rooms of which one side alone knows are judged when this is over: nobody wants to watch 10 s.
        coordinator={"rank": {"reattach_s": 3.0}} if options.kill_coordinator else {},
    )
    began_s = time.monotonic()
    drive_options = DriveOptions(
        handoffs=options.handoffs,
        kill_decode=not options.kill_coordinator,
        kill_coordinator=options.kill_coordinator,
        settle_s=options.settle_s,
    )
    with Cluster(cluster_options) as cluster, Display(console, options.handoffs) as display:
        display.tell(
            f"A coordinator, a prefill engine of {options.prefill_tp} ranks and a decode engine of "
            f"{options.decode_tp} ranks are started; pages{_of(options)} travel by {options.backend}."
        )
        prefill = cluster.add(Role.PREFILL, "prefill-0", options.prefill_tp)
        decode = cluster.add(Role.DECODE, "decode-0", options.decode_tp)
        cluster.wait_ready()
        display.tell(f"All ranks are ready after {time.monotonic() - began_s:.1f} s.")
        drive = Drive(
            cluster, prefill, decode, drive_options, display.tell, lambda: display.tick(cluster.book)
        )
        return drive.run()


def _of(options: DemoOptions) -> str:
    return f" of {options.layout}" if options.layout else ""
