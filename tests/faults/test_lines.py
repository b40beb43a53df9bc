"""Lines that are cut, stalled, half open or forgotten: real clients, a real coordinator, real sockets."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from coordinator.client import (
    ClientSettings,
    DecodeRank,
    Endpoint,
    KVPool,
    Outcome,
    RankState,
    Released,
)
from coordinator.errors import NotReadyError, QueueFullError
from tests.client.engines import Engines
from tests.client.peer import LAYOUT
from tests.support.descriptors import open_files
from tests.support.faults import Faults, frozen
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator.client.rank import Rank
    from tests.support.faults import Line
    from tests.support.processes import Programs


class Lines(Engines):
    """Engines whose decode rank reaches the coordinator over a line that a test can hurt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.faults = self.stack.enter_context(Faults())
        self.outcomes = f"ipc://{self.directory}/outcomes"

    def line(self) -> Line:
        """A way to the coordinator."""
        return self.faults.line(self.address, self.outcomes)

    def connect(self, address: str, group: str = "d", rank: int = 0, world_size: int = 1) -> DecodeRank:
        """A decode rank over a line; impatient."""
        settings = ClientSettings(away_after_s=1.0, hello_retry_s=0.2)
        endpoint = self.endpoint
        if world_size > 1:
            pool = self.stack.enter_context(KVPool.allocate(LAYOUT, 16, world_size))
            endpoint = self.stack.enter_context(Endpoint(pool, backend="loopback"))
        return self.stack.enter_context(
            DecodeRank.connect(
                address,
                group=group,
                rank=rank,
                world_size=world_size,
                endpoint=endpoint,
                settings=settings,
            )
        )

    def move_decode(self) -> Line:
        """Let decode come over a line instead."""
        line = self.line()
        self.decode.close()
        self.decode = self.connect(line.address)
        self.ready()
        return line


@pytest.fixture
def lines(programs: Programs, short_dir: Path) -> Iterator[Lines]:
    with ExitStack() as stack:
        yield Lines(programs, short_dir, stack)


def drained(lines: Lines, rank: Rank) -> list[int]:
    """The rooms whose verdict a rank has heard, in order."""
    had = lines.events.setdefault(rank, [])
    had.extend(rank.drain())
    return [event.room for event in had if isinstance(event, Outcome)]


# --- who hears nothing -----------------------------------------------------------------------


def test_who_subscribes_late_is_named_and_gets_what_it_missed(lines: Lines) -> None:
    """Cases C41 and C33: the address that is told for the outcomes leads nowhere, at first."""
    line = lines.line()
    line.outcomes.refuse()
    late = lines.connect(line.address, "late")
    eventually(lambda: late.state is RankState.JOINED, 10, "joined")
    with pytest.raises(NotReadyError, match=rf"nothing was heard yet from {line.outcomes.address}"):
        late.wait_ready(0.4)
    for room in range(1, 6):
        late.offer(room, [room])
        late.cancel(room, "no more memory")
    eventually(lambda: len(late._conversation.outbox) <= 10, 10, "said")
    line.outcomes.heal()
    late.wait_ready(10)
    eventually(lambda: drained(lines, late) == [1, 2, 3, 4, 5], 10, "all five verdicts")
    lines.hand_over(9)


def test_the_ranks_that_are_missing_are_named(lines: Lines) -> None:
    """Case C33."""
    lines.prefill.close()
    first = lines.connect(lines.address, "d4", 0, 4)
    eventually(lambda: first._conversation.standing.missing == [1, 2, 3], 10, "it waits for three")
    with pytest.raises(NotReadyError, match=r"still waits for other ranks of the group: d4/1, d4/2, d4/3"):
        first.wait_ready(0.01)
    third = lines.connect(lines.address, "d4", 2, 4)
    eventually(lambda: third._conversation.standing.missing == [1, 3], 10, "it waits for two")
    assert third._conversation.standing.explain().endswith("group: d4/1, d4/3")


# --- sockets that do not work any more -------------------------------------------------------


@pytest.mark.parametrize("which", ["control", "outcomes"])
def test_one_socket_that_is_wedged_is_made_anew_and_what_it_missed_is_fetched(
    lines: Lines, which: str
) -> None:
    """Case C42: the other socket works."""
    line = lines.move_decode()
    lines.hand_over(1)
    wedged = line.control if which == "control" else line.outcomes
    before = wedged.accepted
    wedged.vanish()
    for room in (2, 3, 4):
        lines.hand_over(room)
    assert wedged.accepted > before


def test_a_line_that_is_cut_again_and_again_costs_nothing_but_time(lines: Lines) -> None:
    """Also with broadcasts lost, doubled and late meanwhile (case C05)."""
    line = lines.line()
    weather = line.storm(seed=11, lost=0.2, doubled=0.2, late=0.2)
    lines.decode.close()
    lines.decode = lines.connect(line.address)
    lines.ready()
    for room in range(1, 16):
        if room % 3 == 0:
            line.cut()
        lines.hand_over(room)
    assert drained(lines, lines.decode) == list(range(1, 16))
    assert min(weather.met[fate] for fate in ("lost", "doubled", "late")) > 0


def test_a_slow_line_is_no_dead_one(lines: Lines) -> None:
    line = lines.move_decode()
    line.delay(0.3)
    for room in (1, 2):
        lines.hand_over(room)
    assert lines.decode.state is RankState.READY


# --- who does not read -----------------------------------------------------------------------


def test_a_rank_that_takes_nothing_any_more_holds_up_nobody(lines: Lines) -> None:
    """Case C14: megabytes of outcomes wait for it; the others are served at once, and so is it later."""
    line = lines.line()
    slow = lines.connect(line.address, "slow")
    slow.wait_ready(10)
    line.outcomes.down.stall()
    line.control.down.stall()
    rooms = range(1001, 3001)
    for room in rooms:
        slow.offer(room, [1])
        slow.cancel(room, "x" * 4000)
    for room in range(1, 31):
        began_s = time.monotonic()
        lines.hand_over(room)
        assert time.monotonic() - began_s < 2.0
    line.heal()
    eventually(lambda: drained(lines, slow) == list(rooms), 30, "everything in the end")


def test_a_rank_that_stands_still_is_lost_and_holds_up_nobody(lines: Lines, programs: Programs) -> None:
    """The same with a process that is stopped: it is lost after a while, and the next one is served."""
    code = (
        "import sys, time\n"
        "from coordinator.client import DecodeRank, Endpoint, KVPool\n"
        "from tests.client.peer import LAYOUT\n"
        "pool = KVPool.allocate(LAYOUT, 16)\n"
        "endpoint = Endpoint(pool, backend='loopback')\n"
        "rank = DecodeRank.connect(sys.argv[1], group='still', rank=0, world_size=1, endpoint=endpoint)\n"
        "rank.wait_ready(30)\n"
        "rank.offer(77, [1])\n"
        "while len(rank._conversation.outbox):\n"
        "    time.sleep(0.01)\n"
        "print('offered', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
        "    for event in rank.drain():\n"
        "        print('heard', event.room, flush=True)\n"
    )
    still = programs.python("-c", code, lines.address)
    still.says("offered", 30)
    with frozen(still.process.pid):
        lines.prefill.send(77, [3], last=False)
        lines.hand_over(1)
        outcome = lines.outcome(lines.prefill, 77)
        assert outcome.failure is not None
        assert outcome.failure.reason.value == "peer_lost"
        assert outcome.failure.origin == "still/0"
        lines.hand_over(2)
    still.says("heard 77", 20)


# --- handshakes that stop half-way -----------------------------------------------------------


def test_half_a_handshake_holds_up_nobody(lines: Lines) -> None:
    """Case C15, towards the coordinator: a hundred connections that never say who they are."""
    with ExitStack() as stack:
        for name in ("control", "outcomes"):
            for size in range(50):
                half = stack.enter_context(socket.socket(socket.AF_UNIX))
                half.connect(f"{lines.directory}/{name}")
                half.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL".ljust(64, b"\0")[:size])
        for room in (1, 2, 3):
            lines.hand_over(room)


def test_a_coordinator_that_stops_in_its_greeting_is_tried_again(lines: Lines) -> None:
    """Case C15, towards a rank: the first connection never comes to an end."""
    line = lines.line()
    line.control.down.stall(after_bytes=20)
    lines.decode.close()
    lines.decode = lines.connect(line.address)
    eventually(lambda: line.control.accepted, 10, "a connection")
    with pytest.raises(NotReadyError, match=r"no coordinator at tcp://.* has accepted this rank yet"):
        lines.decode.wait_ready(0.5)
    line.heal()
    lines.decode.wait_ready(10)
    lines.hand_over(1)


# --- a coordinator that is not there ---------------------------------------------------------


def test_towards_a_coordinator_that_is_absent_for_long_everything_is_bounded(lines: Lines) -> None:
    """What was accepted meanwhile is handed over when it is back; what was not, raised."""
    line = lines.line()
    lines.decode.close()
    settings = ClientSettings(queue_items=50, away_after_s=1.0, hello_retry_s=0.2)
    lines.decode = lines.stack.enter_context(
        DecodeRank.connect(
            line.address, group="d", rank=0, world_size=1, endpoint=lines.endpoint, settings=settings
        )
    )
    lines.ready()
    lines.hand_over(1)
    line.refuse()
    eventually(lambda: lines.decode.state is RankState.COORDINATOR_AWAY, 10, "away")
    rooms = range(2, 52)
    for room in rooms:
        lines.decode.offer(room, [2])
    with pytest.raises(QueueFullError, match=r"50 calls .* is away; its return is awaited"):
        lines.decode.offer(52, [2])
    descriptors = open_files()
    away_s = time.monotonic()
    eventually(lambda: time.monotonic() - away_s > 2.0, 10, "many attempts to connect")
    assert open_files() <= descriptors + 4
    line.heal()
    lines.ready()
    for room in rooms:
        lines.prefill.send(room, [3], last=True)
    lines.until(lines.decode, Outcome(51, 1), Released(51, 1))
    assert drained(lines, lines.decode) == [1, *rooms]
