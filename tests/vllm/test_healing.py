"""Real engines that are killed and stopped, and clients that go: every request ends, every block comes back.

The pages travel over TCP: what is under way towards an engine that is stopped stays so.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.vllm.prompts import prompt
from tests.vllm.rig import Answer, Coordinator, Engine, Pair, transfer, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DEADLINE_S: Final = 8.0
LOST_S: Final = 6.0
#: From the verdict until blocks are quiet: settle_s, drain_s, two heartbeats, on a busy host.
RELEASE_S: Final = 15.0
MANY: Final = 6
LONG: Final = 2000
TCP: Final = {"transports": "tcp"}


class Rig:
    """A coordinator, a prefill engine and a decode engine, each of which can be started anew."""

    def __init__(self, python: str, model: Path, place: Path, stack: ExitStack) -> None:
        self._start = (python, model, place)
        self._stack = stack
        self.coordinator = stack.enter_context(Coordinator(place, deadline_s=DEADLINE_S, **TCP))
        self.pool = stack.enter_context(ThreadPoolExecutor(2 * MANY))
        self.prefill, self.decode = self._prefill(), self._decode("fail")
        self.prefill.ready()
        self.decode.ready()
        self.expected = {
            seed: self.prefill.ask(prompt(seed, LONG), 8).tokens for seed in range(100, 100 + MANY)
        }
        self.serves()

    def _prefill(self) -> Engine:
        to = transfer("kv_producer", "prefill", self.coordinator.address, coordinator_lost_s=LOST_S)
        engine = Engine(*self._start, transfer=to)
        self._stack.callback(engine.close)
        return engine

    def _decode(self, policy: str) -> Engine:
        to = transfer(
            "kv_consumer", "decode", self.coordinator.address, policy=policy, backend_options=TCP,
            coordinator_lost_s=LOST_S, queued_s=1.0,
        )  # fmt: skip
        engine = Engine(*self._start, transfer=to)
        self._stack.callback(engine.close)
        return engine

    def new_decode(self, policy: str) -> None:
        """Start decode anew."""
        self.decode.close()
        self.decode = self._decode(policy).ready()

    def new_prefill(self) -> None:
        """Start prefill anew."""
        self.prefill.close()
        self.prefill = self._prefill().ready()

    def serves(self) -> None:
        """Check that both engines work together, and that all blocks are free then."""
        for seed, tokens in list(self.expected.items())[:2]:
            name = f"serves-{seed}-{time.monotonic()}"
            assert Pair(self.prefill, self.decode).ask(prompt(seed, LONG), name, 8).tokens == tokens
        self.are_free()

    def are_free(self) -> None:
        """Wait until nobody holds a block."""
        until(lambda: self.prefill.empty() and self.decode.empty(), "all blocks are free", RELEASE_S)

    def decode_asks(self, name: str, seeds: range) -> list[Future[Answer]]:
        """Have decode wait for the KV of some prompts; no two of them have a common prefix."""
        return [
            self.pool.submit(
                self.decode.ask, prompt(seed, LONG), 8,
                kv_transfer_params={"do_remote_prefill": True, "transfer_id": f"{name}-{seed}"},
            )
            for seed in seeds
        ]  # fmt: skip

    def prefill_asks(self, name: str, seeds: range) -> None:
        """Have prefill compute them; it holds their blocks then."""
        wanted = [{"do_remote_decode": True, "transfer_id": f"{name}-{seed}"} for seed in seeds]
        asked = [
            self.pool.submit(self.prefill.ask, prompt(seed, LONG), 1, kv_transfer_params=params)
            for seed, params in zip(seeds, wanted, strict=True)
        ]
        for future in asked:
            assert future.result().params["do_remote_prefill"]

    def handoffs(self) -> list[dict[str, Any]]:
        """What is in flight, or holds pages."""
        found: list[dict[str, Any]] = self.coordinator.get("/v1/handoffs")["handoffs"]
        return found

    def in_flight_to_a_stopped_decode(self, name: str, seeds: range) -> list[Future[Answer]]:
        """Have transfers under way towards a decode engine that is stopped; returns what it was asked."""
        asked = self.decode_asks(name, seeds)
        until(lambda: len(self.handoffs()) == len(seeds), "decode has offered its blocks")
        self.decode.group.signal(signal.SIGSTOP)
        self.prefill_asks(name, seeds)
        until(lambda: sum(handoff["moving_bytes"] for handoff in self.handoffs()), "bytes are under way")
        assert not self.prefill.empty()
        return asked


@pytest.fixture(scope="module")
def rig(python: str, model: Path, place: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(python, model, place, stack)


def test_a_client_that_goes_while_decode_waits(rig: Rig) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "gone-1"}
    with pytest.raises(TimeoutError):
        rig.decode.ask(prompt(200, LONG), timeout_s=1.0, kv_transfer_params=params)
    rig.are_free()
    # Prefill comes too late, and is told so.
    began_s = time.monotonic()
    rig.prefill.ask(
        prompt(200, LONG), 1, kv_transfer_params={"do_remote_decode": True, "transfer_id": "gone-1"}
    )
    rig.are_free()
    assert time.monotonic() - began_s < DEADLINE_S
    rig.serves()


def test_what_decode_never_asks_for_comes_back_at_the_deadline(rig: Rig) -> None:
    began_s = time.monotonic()
    rig.prefill_asks("never", range(210, 212))
    assert not rig.prefill.empty()
    rig.are_free()
    assert time.monotonic() - began_s > DEADLINE_S - 1.0
    rig.serves()


def test_a_deadline_while_decode_is_stopped(rig: Rig) -> None:
    seeds = range(220, 220 + MANY)
    kept = {seed: rig.decode.ask(prompt(seed, LONG), 8).tokens for seed in range(300, 303)}
    before = rig.coordinator.get("/v1/status")["failed"].get("deadline", 0)
    asked = rig.in_flight_to_a_stopped_decode("stopped", seeds)
    until(rig.prefill.empty, "prefill's blocks come back while decode is stopped", DEADLINE_S + RELEASE_S)
    assert rig.coordinator.get("/v1/status")["failed"]["deadline"] == before + MANY
    rig.decode.group.signal(signal.SIGCONT)
    for future in asked:
        answer = future.result()
        assert answer.status == 500, answer
    assert "deadline: waited 8.0 s after prefill" in rig.decode.log.read_text(errors="replace")
    # What decode had in its cache is as it was, and what it computes now, in whatever blocks, is right.
    for seed, tokens in kept.items():
        assert rig.decode.ask(prompt(seed, LONG), 8).tokens == tokens
    for seed, tokens in rig.expected.items():
        assert rig.decode.ask(prompt(seed, LONG), 8).tokens == tokens
    rig.are_free()
    assert rig.coordinator.get("/v1/status")["failed"]["deadline"] == before + MANY
    rig.serves()


def test_what_prefill_never_gets_ends_too(rig: Rig) -> None:
    (asked,) = rig.decode_asks("never-sent", range(215, 216))
    assert asked.result().status == 500
    rig.are_free()


def test_prefill_is_killed_with_transfers_under_way(rig: Rig) -> None:
    asked = rig.in_flight_to_a_stopped_decode("orphans", range(240, 240 + MANY))
    rig.prefill.group.signal(signal.SIGKILL)
    killed_s = time.monotonic()
    rig.decode.group.signal(signal.SIGCONT)
    for future in asked:
        assert future.result().status == 500
    until(rig.decode.empty, "decode's blocks come back", RELEASE_S)
    assert time.monotonic() - killed_s < RELEASE_S
    assert "the process of prefill/0 " in rig.decode.log.read_text(errors="replace")
    rig.new_prefill()
    rig.serves()


def test_decode_is_killed_with_transfers_under_way(rig: Rig) -> None:
    rig.in_flight_to_a_stopped_decode("killed", range(230, 230 + MANY))
    rig.decode.group.signal(signal.SIGKILL)
    killed_s = time.monotonic()
    until(rig.prefill.empty, "prefill's blocks come back", RELEASE_S)
    assert time.monotonic() - killed_s < DEADLINE_S, "and not because of the deadline"
    until(lambda: not rig.handoffs(), "nothing is left", RELEASE_S)
    # The next tests are about the other policy.
    rig.new_decode("recompute")
    rig.serves()


def test_prefill_is_killed_and_decode_computes_what_does_not_come(rig: Rig) -> None:
    seeds = range(100, 100 + MANY)
    asked = rig.in_flight_to_a_stopped_decode("recomputed", seeds)
    rig.prefill.group.signal(signal.SIGKILL)
    rig.decode.group.signal(signal.SIGCONT)
    for seed, future in zip(seeds, asked, strict=True):
        assert future.result().tokens == rig.expected[seed]
    until(rig.decode.empty, "decode's blocks come back", RELEASE_S)
    rig.new_prefill()
    rig.serves()


def test_the_coordinator_is_lost_and_comes_back(rig: Rig) -> None:
    """What waits is computed by decode, and prefill's blocks come back."""
    seeds = range(250, 252)
    asked = rig.decode_asks("lost", seeds)
    rig.prefill_asks("unasked", range(252, 254))
    until(lambda: len(rig.handoffs()) == 4, "all are in flight")
    rig.coordinator.kill()
    killed_s = time.monotonic()
    for seed, future in zip(seeds, asked, strict=True):
        assert future.result().tokens == rig.prefill.ask(prompt(seed, LONG), 8).tokens
    rig.are_free()
    assert time.monotonic() - killed_s < LOST_S + RELEASE_S
    rig.coordinator.start()
    rig.serves()
