"""Real engines' processes that run their workers themselves, over their own tensors, and how they end."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.client import (
    DecodeRank,
    Endpoint,
    KVPool,
    Outcome,
    Reason,
    Released,
)
from tests.backends.rigs import needs_mooncake, needs_nixl
from tests.client.coordinator import Coordinator
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from coordinator.messages import Event
    from tests.support.processes import Program, Programs

#: One tensor for each of two layers, K and V apart, as an engine has them; or memory that is allocated
#: for it, where an import of torch, which takes seconds, would prove nothing more.
PREFILL = """
import faulthandler, logging, sys, time
from coordinator.client import KVPool, Layout, Outcome, PrefillRank, Released
faulthandler.enable()
logging.basicConfig(level=logging.INFO)
address, memory, ending = sys.argv[1:]
layout = Layout(layers=2, page_tokens=4, kv_heads=4, head_size=8, dtype="float16")
if memory == "allocated":
    pool = KVPool.allocate(layout, 16)
    layers = pool.arrays[0].reshape(2, 2, 16, 256)
else:
    import torch
    layers = [torch.zeros(2, 16, 256, dtype=torch.uint8, device=memory) for _ in range(2)]
    pool = KVPool.wrap(layers, layout)
for number, layer in enumerate(layers):
    layer[0, 3], layer[1, 3] = 10 + number, 20 + number
    layer[0, 4], layer[1, 4] = 30 + number, 40 + number
if memory.startswith("cuda"):
    torch.cuda.synchronize()
rank = PrefillRank.connect(address, group="p", rank=0, world_size=1, pool=pool)
rank.wait_ready(20)
print("ready", flush=True)
rank.send(7, [3, 4], last=True)
left = {Outcome, Released}
while left:
    rank.wait(1)
    for event in rank.drain(through=rank.head):
        print(event, flush=True)
        left.discard(type(event))
if ending == "close":
    rank.close()
print("over", flush=True)
"""


class Stage:
    """A coordinator, a decode engine of one rank in this process, and prefill programs."""

    def __init__(
        self, programs: Programs, directory: Path, stack: ExitStack, backend: str, device: str = "cpu"
    ) -> None:
        self.programs = programs
        self.memory = device
        self.coordinator = Coordinator(programs, directory, backend, "rank")
        self.address = self.coordinator.address
        if backend == "loopback":
            self.target = stack.enter_context(KVPool.allocate(LAYOUT, 16))
        else:
            # A tensor for each plane: the two sides need not be cut up alike.
            planes = [torch.zeros(16, 256, dtype=torch.uint8, device=device) for _ in range(4)]
            self.target = stack.enter_context(KVPool.wrap(planes, LAYOUT))
        self.endpoint = stack.enter_context(Endpoint(self.target, backend))
        self.decode = stack.enter_context(
            DecodeRank.connect(
                self.coordinator.address, group="d", rank=0, world_size=1, endpoint=self.endpoint
            )
        )
        self.events: list[Event] = []

    def prefill(self, ending: str = "close") -> Program:
        """Start a prefill engine, which sends two pages for room 7."""
        return self.programs.python("-c", PREFILL, self.address, self.memory, ending)

    def until(self, kind: type[Event]) -> Event:
        """Drain at decode until an event of this kind has come."""

        def came() -> list[Event]:
            self.events.extend(self.decode.drain())
            return [event for event in self.events if isinstance(event, kind)]

        return eventually(came, 20, kind.__name__)[-1]

    def page(self, number: int) -> list[int]:
        """The first byte of a page in each plane; all bytes of a plane's page must be alike."""
        planes = torch.cat([tensor[:, number] for tensor in self.target.tensors]).cpu()
        assert torch.equal(planes, planes[:, :1].expand_as(planes))
        return [int(byte) for byte in planes[:, 0]]


@pytest.mark.parametrize(
    ("backend", "ending"),
    [
        ("loopback", "close"),
        # Native engines crash in the interpreter's own way out, unless they are gone by then.
        pytest.param("nixl", "fall off", marks=needs_nixl),
        pytest.param("mooncake", "fall off", marks=needs_mooncake),
    ],
)
def test_pages_travel_from_an_engine_s_own_layers_and_its_process_ends_well(
    programs: Programs, short_dir: Path, stack: ExitStack, backend: str, ending: str
) -> None:
    check_travel(Stage(programs, short_dir, stack, backend), ending)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this host has no CUDA device: VRAM is not tested")
@pytest.mark.parametrize("backend", [pytest.param("nixl", marks=needs_nixl)])
def test_pages_travel_from_gpu_to_gpu(
    programs: Programs, short_dir: Path, stack: ExitStack, backend: str
) -> None:
    """Registered as VRAM on both sides."""
    check_travel(Stage(programs, short_dir, stack, backend, device="cuda:0"), "close")


def check_travel(stage: Stage, ending: str) -> None:
    """Hand two pages over, and see prefill's process end."""
    prefill = stage.prefill(ending)
    prefill.says("ready", 30)
    stage.decode.wait_ready(20)
    stage.decode.offer(7, [8, 1])
    outcome = stage.until(Outcome)
    assert isinstance(outcome, Outcome)
    assert outcome.succeeded, outcome
    assert stage.page(8) == [10, 20, 11, 21]
    assert stage.page(1) == [30, 40, 31, 41]
    stage.until(Released)
    prefill.says("over", 20)
    assert prefill.wait(20) == 0, prefill.output()
    assert "Traceback" not in prefill.output()
    assert "kv-worker" not in prefill.output()


def stalled(stage: Stage) -> Program:
    """A handoff of room 7 that stands still in the middle of a page."""
    stage.memory = "allocated"
    stage.coordinator.stall()
    prefill = stage.prefill()
    prefill.says("ready", 30)
    stage.decode.offer(7, [8, 1])
    eventually(lambda: bool(stage.target.tensor[0, 8].any()), 10, "a page has begun to arrive")
    return prefill


def test_a_cancelled_handoff_is_fenced_and_released(
    programs: Programs, short_dir: Path, stack: ExitStack
) -> None:
    """Case C11: what never settles is fenced within the rank, and both sides have their pages back."""
    stage = Stage(programs, short_dir, stack, "loopback")
    prefill = stalled(stage)
    stage.decode.cancel(7, "as the test says")
    outcome = stage.until(Outcome)
    assert isinstance(outcome, Outcome)
    assert outcome.failure is not None
    assert outcome.failure.reason is Reason.CANCELLED_BY_DECODE
    stage.until(Released)
    prefill.says("over", 20)
    assert prefill.wait(20) == 0
    assert "release.fence" in stage.coordinator.program.output()
    assert "worker.not_killed" not in stage.coordinator.program.output()


def test_the_end_of_its_process_makes_a_worker_quiet(
    programs: Programs, short_dir: Path, stack: ExitStack
) -> None:
    stage = Stage(programs, short_dir, stack, "loopback")
    prefill = stalled(stage)
    prefill.process.kill()
    outcome = stage.until(Outcome)
    assert isinstance(outcome, Outcome)
    assert outcome.failure is not None
    assert outcome.failure.reason is Reason.RANK_LOST
    stage.until(Released)
    stage.coordinator.flow()
    again = stage.prefill()
    again.says("ready", 30)
    stage.decode.offer(7, [2, 5])
    eventually(stage.decode.drain, 20, "the outcome of the next engine's handoff")
    assert stage.page(2) == [10, 20, 11, 21]
    assert again.wait(20) == 0


def test_a_stopped_process_holds_the_pages_that_it_may_still_write(
    programs: Programs, short_dir: Path, stack: ExitStack
) -> None:
    """Cases C16 and C23: silent is not dead. When it goes on it writes to nobody."""
    stage = Stage(programs, short_dir, stack, "loopback")
    prefill = stalled(stage)
    os.kill(prefill.process.pid, signal.SIGSTOP)
    try:
        outcome = stage.until(Outcome)
        assert isinstance(outcome, Outcome)
        assert outcome.failure is not None
        assert outcome.failure.reason is Reason.RANK_LOST
        stage.coordinator.program.says("worker.not_killed", 10)
        stage.decode.drain()
        assert not [event for event in stage.events if isinstance(event, Released)]
    finally:
        os.kill(prefill.process.pid, signal.SIGCONT)
    stage.until(Released)
    assert prefill.wait(20) == 0
