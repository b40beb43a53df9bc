"""When a rank looks for its proof: at once, ever more rarely, and never on account of another loss."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from backends.base import BackendError
from coordinator.client.proof import Proof
from coordinator.client.prover import Prover

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.client.clock import Clock
    from coordinator.client.lives import Lives

TOLD = "are held: somebody may still use them"


def nothing() -> None:
    """Happen meanwhile."""


class HandProof(Proof):
    """Holds when the test says so, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.quiet = False
        self.error: BackendError | None = None
        self.meanwhile: Callable[[], None] = nothing

    def lost(self) -> None:
        self.calls.append("lost")

    def prepare(self) -> None:
        self.calls.append("prepare")
        self.meanwhile()
        if self.error is not None:
            raise self.error

    def holds(self, instance: int) -> bool:
        self.calls.append(f"holds {instance}")
        self.meanwhile()
        return self.quiet

    def welcomed(self) -> None:
        self.calls.append("welcomed")

    def close(self) -> None:
        self.calls.append("close")


def conversation(instance: int) -> SimpleNamespace:
    """What is asked of one."""
    return SimpleNamespace(
        joined=False, hello=SimpleNamespace(instance=instance), standing=SimpleNamespace(name="d/0")
    )


class Bench:
    """A prover whose time passes by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.proven: list[float] = []
        self.lives = SimpleNamespace(conversation=conversation(1), unreleased=3, proven=self.proven.append)
        self.proof = HandProof()
        clock = SimpleNamespace(now_s=lambda: self.now_s)
        self.prover = Prover(cast("Lives", self.lives), self.proof, cast("Clock", clock))

    def is_mute(self) -> bool:
        """Whether nothing may be said yet."""
        return self.prover.prepares

    def work(self) -> bool:
        """Give it a turn."""
        return self.prover.work(threading.Condition())

    def work_when_due(self) -> float:
        """Give it a turn when it wants one; how long that took, in its own time."""
        pause_s = self.prover.due_s - self.now_s
        self.now_s = self.prover.due_s
        self.work()
        return pause_s


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_without_a_loss_nothing_is_looked_at(bench: Bench) -> None:
    assert not bench.is_mute()
    assert not bench.work()
    assert bench.proof.calls == []


def test_a_loss_is_prepared_for_and_looked_at_at_once_and_done_with_when_proven(bench: Bench) -> None:
    bench.proof.quiet = True
    bench.prover.lost()
    assert bench.is_mute()
    assert bench.work()
    assert bench.proof.calls == ["lost", "prepare", "holds 1"]
    assert bench.proven == [100.0]

    bench.now_s += 1e6
    assert not bench.work()
    assert bench.proof.calls[3:] == []


def test_what_is_not_quiet_is_looked_at_ever_more_rarely_and_prepared_for_once(bench: Bench) -> None:
    bench.prover.lost()
    bench.work()
    pauses_s = [bench.work_when_due() for _ in range(9)]
    assert pauses_s == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0])
    bench.now_s += 0.5
    assert not bench.work(), "before its time"
    assert bench.proof.calls == ["lost", "prepare", *["holds 1"] * 10]
    assert bench.proven == []


def test_the_next_loss_is_looked_at_as_soon_as_the_first(bench: Bench) -> None:
    bench.prover.lost()
    for _ in range(9):
        bench.work()
        bench.now_s += 1.0
    bench.prover.lost()
    bench.work()
    assert bench.work_when_due() == pytest.approx(0.02)
    assert bench.proof.calls[-4:] == ["lost", "prepare", "holds 1", "holds 1"]


def test_pages_that_are_held_for_long_are_told_now_and_then(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.prover.lost()
    bench.work()
    for seconds in range(1, 36):
        bench.now_s = 100.0 + seconds
        bench.work()
        assert caplog.text.count(TOLD) == seconds // 11, "more than 10 s after the last time"
    assert "d/0: the pages of 3 handoffs" in caplog.text


def test_what_cannot_be_prepared_is_tried_again_later_and_proves_nothing_before(bench: Bench) -> None:
    bench.proof.quiet, bench.proof.error = True, BackendError("no more ports")
    bench.prover.lost()
    assert not bench.work()
    assert bench.is_mute()
    assert not bench.work()
    assert bench.proof.calls == ["lost", "prepare"]
    assert bench.work_when_due() == 5.0
    bench.proof.error = None
    bench.work_when_due()
    assert bench.proof.calls == ["lost", "prepare", "prepare", "prepare", "holds 1"]
    assert not bench.is_mute()
    assert bench.proven == [110.0]


def test_what_was_prepared_for_one_loss_proves_nothing_of_another_that_came_meanwhile(bench: Bench) -> None:
    bench.proof.quiet, bench.proof.meanwhile = True, bench.prover.lost
    bench.prover.lost()
    assert not bench.work()
    assert bench.proven == []
    bench.proof.meanwhile = nothing
    assert bench.work()
    assert bench.proof.calls == ["lost", "prepare", "lost", "prepare", "holds 1"]


def test_what_held_for_one_life_proves_nothing_of_the_next_that_began_meanwhile(bench: Bench) -> None:
    bench.proof.quiet = True
    bench.prover.lost()

    def next_life() -> None:
        if bench.proof.calls[-1] == "holds 1":
            bench.lives.conversation = conversation(2)

    bench.proof.meanwhile = next_life
    assert not bench.work()
    assert bench.proven == []
    bench.work_when_due()
    assert bench.proof.calls[-2:] == ["holds 1", "holds 2"]
    assert len(bench.proven) == 1


def test_who_is_welcomed_lets_go_of_what_it_holds(bench: Bench) -> None:
    bench.lives.conversation.joined = True
    assert not bench.work()
    bench.prover.close()
    assert bench.proof.calls == ["welcomed", "close"]
