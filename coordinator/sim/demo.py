"""``kv-coordinator demo``: pages travel, decode is killed and comes back, and nothing is stuck."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from backends import registry
from backends.base import BackendUnavailableError
from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.display import Display, show
from coordinator.sim.drive import Drive, DriveOptions
from coordinator.sim.errors import SimulationError
from coordinator.sim.options import ClusterOptions, small_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from coordinator.sim.engine import Sabotage
    from coordinator.sim.summary import Summary

_ALL_IS_WELL: Final = 0
_FAILED: Final = 1
_UNUSABLE: Final = 2
_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose.

    Attributes:
        backend: what moves the pages.
        prefill_tp: ranks of the prefill engine.
        decode_tp: ranks of the decode engine.
        handoffs: how many requests are handed over.
        kill_coordinator: kill the coordinator in the middle, instead of decode.
        json_path: where the result is written as JSON, too.
        settle_s: bound of every wait for handoffs.
        sabotage: faults to build in, by group name, to prove that the demo can fail.

    """

    backend: str = "nixl"
    prefill_tp: int = 2
    decode_tp: int = 2
    handoffs: int = 200
    kill_coordinator: bool = False
    json_path: Path | None = None
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
        console.print(refusal, highlight=False, soft_wrap=True)
        return _UNUSABLE
    try:
        with _interruptible():
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
    if options.prefill_tp != options.decode_tp:
        return (
            f"Prefill with {options.prefill_tp} ranks and decode with {options.decode_tp}: engines of "
            "unequal size cannot hand over to one another yet; give both the same number."
        )
    if options.json_path is not None and not options.json_path.absolute().parent.is_dir():
        return f"The result cannot be written to {options.json_path}: there is no such directory."
    try:
        registry.load(options.backend)
    except BackendUnavailableError as error:
        return f"{error}."
    return ""


def _drive(options: DemoOptions, console: Console) -> Summary:
    world_size = options.prefill_tp
    cluster_options = ClusterOptions(
        backend=options.backend,
        layout=small_layout(world_size),
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
            f"{options.decode_tp} ranks are started; pages travel by {options.backend}."
        )
        prefill = cluster.add(Role.PREFILL, "prefill-0", options.prefill_tp)
        decode = cluster.add(Role.DECODE, "decode-0", options.decode_tp)
        cluster.wait_ready()
        display.tell(f"All ranks are ready after {time.monotonic() - began_s:.1f} s.")
        drive = Drive(
            cluster, prefill, decode, drive_options, display.tell, lambda: display.tick(cluster.book)
        )
        return drive.run()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is as good as Ctrl-C; a second one of either does not disturb the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
