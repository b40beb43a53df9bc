"""``kv-coordinator replay``: starts the engines, plays the trace back, and shows what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from backends import registry
from backends.base import BackendUnavailableError
from coordinator import presets
from coordinator.errors import ConfigError, LayoutError
from coordinator.messages import Role
from coordinator.replay import geometry, plot, script, table, trace
from coordinator.replay.errors import ReplayError
from coordinator.replay.playback import Playback, PlaybackOptions
from coordinator.replay.router import Pace, Router
from coordinator.sim.cluster import Cluster
from coordinator.sim.display import Display, size_text
from coordinator.sim.errors import SimulationError
from coordinator.sim.files import why_not_writable
from coordinator.sim.interrupt import interruptible
from coordinator.sim.options import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from coordinator.layout import Layout
    from coordinator.replay.result import Result
    from coordinator.replay.script import Fault
    from coordinator.replay.trace import Prompt
    from coordinator.sim.engine import Sabotage

_ALL_IS_WELL: Final = 0
_FAILED: Final = 1
_UNUSABLE: Final = 2
_INTERRUPTED: Final = 130
#: A step of an engine, on the clock.
_STEP_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a person may choose.

    Attributes:
        trace_path: the trace.
        first_s: only what came in the first so many seconds of it; None: all.
        speed: seconds of the trace in a second of the clock.
        backend: what moves the pages.
        layout: name or file of a layout, see ``coordinator.presets``.
        scale_bytes: the layout is cut until a page takes so many bytes, over all ranks of an engine; 0:
            until all pools fit.
        prefill_groups: how many prefill engines.
        prefill_tp: ranks of each.
        decode_groups: how many decode engines.
        decode_tp: ranks of each.
        faults_path: what goes wrong when, see ``script``.
        json_path: where the figures are written as JSON.
        png_path: where the plot is written.
        settle_s: bound of every wait.
        sabotage: faults to build into engines, by name, to prove that the replay can fail.

    """

    trace_path: Path
    first_s: float | None = None
    speed: float = 1.0
    backend: str = "loopback"
    layout: str = "Llama-3.1-8B"
    scale_bytes: int = 0
    prefill_groups: int = 2
    prefill_tp: int = 2
    decode_groups: int = 2
    decode_tp: int = 2
    faults_path: Path | None = None
    json_path: Path | None = None
    png_path: Path | None = None
    settle_s: float = 90.0
    sabotage: Mapping[str, Sabotage] = field(default_factory=dict)

    @property
    def engines(self) -> dict[str, tuple[Role, int]]:
        """Role and ranks of each engine, by name."""
        named = {
            f"prefill-{number}": (Role.PREFILL, self.prefill_tp) for number in range(self.prefill_groups)
        }
        return named | {
            f"decode-{number}": (Role.DECODE, self.decode_tp) for number in range(self.decode_groups)
        }


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is played, and over what."""

    prompts: list[Prompt]
    faults: list[Fault]
    layout: Layout
    pages: int


def run(options: ReplayOptions) -> int:
    """Replay; returns the exit code.

    0: all is well. 1: a page is corrupt, a handoff is unresolved, ranks disagree, or a process
    failed. 2: what was asked for cannot be done. 130: interrupted.
    """
    console = Console()
    try:
        plan = _plan(options)
    except (BackendUnavailableError, ConfigError, LayoutError, ReplayError) as error:
        console.print(f"{error}.", highlight=False, soft_wrap=True, markup=False)
        return _UNUSABLE
    try:
        with interruptible():
            result = _play(options, plan, console)
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started is gone.")
        return _INTERRUPTED
    except SimulationError as error:
        console.print(f"The replay could not run: {error}", highlight=False, soft_wrap=True, markup=False)
        return _FAILED
    _show(options, result, console)
    return _ALL_IS_WELL if result.summary.ok else _FAILED


def _plan(options: ReplayOptions) -> _Plan:
    """Read everything, and decide on sizes.

    Raises:
        BackendUnavailableError: there is no such backend here.
        ConfigError: there is no such layout.
        LayoutError: it is impossible for one of the engines.
        ReplayError: a file cannot be used, or the memory does not suffice.

    """
    for path in (options.json_path, options.png_path):
        problem = "" if path is None else why_not_writable(path)
        if problem:
            message = f"{path} cannot be written: {problem}"
            raise ReplayError(message)
    if options.png_path is not None and not plot.can_write():
        message = f"{options.png_path} cannot be written: {plot.MISSING}"
        raise ReplayError(message)
    registry.load(options.backend)
    world_sizes = {name: world_size for name, (_, world_size) in options.engines.items()}
    prompts = trace.read(options.trace_path, options.first_s)
    faults = script.read(options.faults_path, world_sizes) if options.faults_path is not None else []
    layout = presets.load(options.layout)
    pages = geometry.pool_pages(prompts, layout)
    fitting_bytes = geometry.fitting_bytes(pages, len(world_sizes))
    sizes = sorted(set(world_sizes.values()))
    layout = geometry.scaled(layout, options.scale_bytes or fitting_bytes, sizes)
    for world_size in sizes:
        layout.check(world_size)
    taken_bytes = sum(geometry.page_bytes(layout, world_size) for world_size in world_sizes.values())
    if taken_bytes > fitting_bytes * len(world_sizes):
        message = (
            f"pools of {pages} pages, for some of the longest prompts, would take "
            f"{size_text(pages * taken_bytes)}; a page of {fitting_bytes} bytes would fit (--scale)"
        )
        raise ReplayError(message)
    return _Plan(prompts, faults, layout, pages)


def _play(options: ReplayOptions, plan: _Plan, console: Console) -> Result:
    cluster_options = ClusterOptions(
        backend=options.backend,
        layout=plan.layout,
        pages=plan.pages,
        step_s=_STEP_S,
        sabotage=options.sabotage,
    )
    began_s = time.monotonic()
    with Cluster(cluster_options) as cluster, Display(console, len(plan.prompts)) as display:
        display.tell(_begin(options, plan))
        groups = [cluster.add(role, name, world) for name, (role, world) in options.engines.items()]
        cluster.wait_ready()
        cluster.wait_workers()
        display.tell(f"All ranks are ready after {time.monotonic() - began_s:.1f} s.")
        pace = Pace(options.speed, _STEP_S, plan.layout.page_tokens, plan.pages)
        router = Router(groups[: options.prefill_groups], groups[options.prefill_groups :], pace)
        playback = Playback(
            cluster,
            router,
            pace,
            plan.prompts,
            plan.faults,
            PlaybackOptions(options.decode_tp, options.settle_s),
            display.tell,
            lambda: display.tick(cluster.book),
        )
        return playback.run()


def _begin(options: ReplayOptions, plan: _Plan) -> str:
    last_s = plan.prompts[-1].at_s
    return (
        f"{len(plan.prompts)} requests of {last_s:.0f} s are replayed in {last_s / options.speed:.0f} s, "
        f"over {options.prefill_groups} prefill engines of {options.prefill_tp} ranks and "
        f"{options.decode_groups} decode engines of {options.decode_tp}. Pages of {options.layout} travel by "
        f"{options.backend}; one has {plan.layout.page_tokens} tokens and, cut to fit, "
        f"{geometry.page_bytes(plan.layout, options.prefill_tp)} bytes."
    )


def _show(options: ReplayOptions, result: Result, console: Console) -> None:
    plot.show(console, result)
    table.show(console, result)
    if options.png_path is not None:
        plot.write(options.png_path, result)
    if options.json_path is not None:
        options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result.as_json())) + b"\n")
