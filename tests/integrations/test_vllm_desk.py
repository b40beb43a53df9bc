"""What ranks of vLLM's engines say and report, against a real coordinator: once, and never too early."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from coordinator.client import ClientSettings, DecodeRank, Endpoint, KVPool, PrefillRank
from coordinator.integrations.vllm.desk import Desk
from coordinator.integrations.vllm.orders import Cancel, Extend, Offer, Open, Send
from tests.client.peer import LAYOUT
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator.messages import Event
    from tests.support.processes import Program, Programs

CONFIG = """
[listen]
control = ["ipc://{directory}/control"]
outcomes = ["ipc://{directory}/outcomes"]
[http]
address = ""
[backend]
name = "loopback"
[handoff]
deadline_s = 2.0
offer_ttl_s = 2.0
[rank]
heartbeat_s = 0.2
reattach_s = 1.0
[release]
settle_s = 0.2
drain_s = 0.2
"""
ROOM = 7
LOST_S = 3.0


@dataclass
class Side:
    """A desk, and all that it has reported."""

    desk: Desk
    quiet: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Note what is new."""
        results = self.desk.results()
        self.quiet += sorted(results.quiet)
        self.failed += sorted(results.failed)
        assert len(set(self.quiet)) == len(self.quiet), "reported twice"
        assert len(set(self.failed)) == len(self.failed), "reported twice"

    def until_quiet(self, *requests: str, timeout_s: float = 10.0) -> None:
        """Wait until the blocks of these requests, and of no others, are quiet."""

        def seen() -> bool:
            self.look()
            return set(requests) <= set(self.quiet)

        eventually(seen, timeout_s, f"{requests} are quiet, and not only {self.quiet}")
        assert sorted(self.quiet) == sorted(requests)


class Engines:
    """A coordinator, and one rank of each engine."""

    def __init__(self, programs: Programs, directory: Path, stack: ExitStack) -> None:
        self.programs, self.directory = programs, directory
        (directory / "config.toml").write_text(CONFIG.format(directory=directory))
        self.address = f"ipc://{directory}/control"
        self.coordinator = self.serve()
        settings = ClientSettings(coordinator_lost_s=LOST_S)
        source, target = (stack.enter_context(KVPool.allocate(LAYOUT, 16)) for _ in range(2))
        endpoint = stack.enter_context(Endpoint(target, backend="loopback"))
        self.clients = (
            PrefillRank.connect(
                self.address, group="p", rank=0, world_size=1, pool=source, settings=settings
            ),
            DecodeRank.connect(
                self.address, group="d", rank=0, world_size=1, endpoint=endpoint, settings=settings
            ),
        )
        self.prefill, self.decode = (Side(Desk(client, self.address)) for client in self.clients)
        for side in (self.decode, self.prefill):
            stack.callback(side.desk.close)
        for client in self.clients:
            client.wait_ready(20.0)

    def serve(self) -> Program:
        """Start a coordinator."""
        program = self.programs.python(
            "-m", "coordinator", "serve", "--config", f"{self.directory}/config.toml"
        )
        program.says("coordinator.ready")
        return program

    def queue(self, request: str, room: int = ROOM) -> None:
        """Prefill has queued it."""
        self.prefill.desk.take(Open(request, room, self.address))

    def send(self, request: str, room: int = ROOM) -> None:
        """Prefill has computed it."""
        self.prefill.desk.take(Send(request, room, self.address, [1, 2]))

    def offer(self, request: str, room: int = ROOM) -> None:
        """Decode has pages for it."""
        self.decode.desk.take(Offer(request, room, self.address, [3, 4], 0))

    def abort(self, side: Side, request: str, room: int = ROOM) -> None:
        """Its client has gone."""
        side.desk.take(Cancel(request, room, self.address, "gone"))


@pytest.fixture
def engines(programs: Programs, short_dir: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(programs, short_dir, stack)


def test_success_is_reported_once_on_each_side(engines: Engines) -> None:
    engines.queue("p1")
    engines.send("p1")
    engines.offer("d1")
    engines.prefill.until_quiet("p1")
    engines.decode.until_quiet("d1")
    assert engines.prefill.failed == engines.decode.failed == []


def test_a_room_is_used_again_at_once(engines: Engines) -> None:
    """The second request says all it has to say before the first one's verdict was looked at."""
    for number in "12":
        engines.queue(f"p{number}")
        engines.send(f"p{number}")
        engines.offer(f"d{number}")

    def seen() -> bool:
        engines.prefill.look()
        engines.decode.look()
        return engines.prefill.quiet == ["p1", "p2"] and engines.decode.quiet == ["d1", "d2"]

    eventually(seen, 10.0)
    assert engines.prefill.failed == engines.decode.failed == []


def test_a_release_that_comes_while_the_room_before_is_used_again_is_not_lost(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request's word is said in the middle of what was drained: what comes then is behind it."""
    client, desk = engines.clients[1], engines.decode.desk
    drain = client.drain
    come: list[Event] = []
    pieces: list[list[Event]] = []

    def drained() -> list[Event]:
        come.extend(drain())
        return come

    monkeypatch.setattr(client, "drain", lambda **_: pieces.pop(0) if pieces else [])
    engines.offer("d1")
    engines.abort(engines.decode, "d1")
    eventually(lambda: len(drained()) == 2, 10.0)
    engines.offer("d2", ROOM + 1)
    engines.abort(engines.decode, "d2", ROOM + 1)
    eventually(lambda: len(drained()) == 4, 10.0)
    engines.offer("d3")
    verdict, *middle, release = come
    assert (verdict.room, release.room) == (ROOM, ROOM + 1)
    pieces += [[verdict], middle, [release]]
    for _ in range(3):
        engines.decode.look()
    assert sorted(engines.decode.quiet) == ["d1", "d2"]
    assert {use.request for use in desk._uses.values()} == {"d3"}


def test_decode_never_comes(engines: Engines) -> None:
    engines.send("p1")
    engines.prefill.until_quiet("p1")
    assert engines.prefill.failed == ["p1"]


def test_prefill_never_comes(engines: Engines) -> None:
    engines.offer("d1")
    engines.decode.until_quiet("d1")
    assert engines.decode.failed == ["d1"]


def test_prefill_is_aborted_before_it_has_pages(engines: Engines) -> None:
    engines.queue("p1")
    engines.offer("d1")
    engines.abort(engines.prefill, "p1")
    engines.decode.until_quiet("d1")
    assert engines.decode.failed == ["d1"]
    engines.prefill.until_quiet()
    assert engines.prefill.desk._uses == {}


def test_decode_is_aborted_before_it_has_pages(engines: Engines) -> None:
    """Prefill's pages come back at once, and not at the deadline (case C22)."""
    engines.send("p1")
    engines.abort(engines.decode, "d1")
    engines.prefill.until_quiet("p1", timeout_s=1.5)
    assert engines.prefill.failed == ["p1"]
    assert engines.decode.desk._uses == {}


def test_decode_is_aborted_while_it_waits(engines: Engines) -> None:
    engines.queue("p1")
    engines.offer("d1")
    engines.abort(engines.decode, "d1")
    engines.decode.until_quiet("d1")
    engines.send("p1")
    engines.prefill.until_quiet("p1")
    assert engines.prefill.failed == ["p1"]


def test_an_abort_after_the_verdict_says_nothing(engines: Engines) -> None:
    engines.queue("p1")
    engines.send("p1")
    engines.offer("d1")
    eventually(lambda: all(client.wait(0.1) for client in engines.clients))
    engines.abort(engines.decode, "d1")
    engines.decode.until_quiet("d1")
    engines.prefill.until_quiet("p1")
    assert engines.prefill.failed == []


def test_what_failed_while_decode_had_it_queued_fails_when_it_has_pages(engines: Engines) -> None:
    engines.decode.desk.take(Extend("d1", ROOM, engines.address))
    engines.send("p1")
    engines.abort(engines.prefill, "p1")
    engines.prefill.until_quiet("p1")
    eventually(lambda: engines.clients[1].wait(0.1))
    engines.offer("d1")
    engines.decode.until_quiet("d1", timeout_s=0.5)
    assert engines.decode.failed == ["d1"]


def test_where_one_rank_reports_nothing_is_drained_but_by_its_token(engines: Engines) -> None:
    client = engines.clients[1]
    desk = Desk(client, engines.address, by_token=True)
    before = client.head
    engines.send("p1")
    desk.take(Offer("d1", ROOM, engines.address, [3, 4], 0))
    eventually(lambda: client.head != before, 10.0)
    desk.follow(before)
    assert desk.results().quiet == set()

    def quiet() -> bool:
        desk.follow(desk.head)
        return desk.results().quiet == {"d1"}

    eventually(quiet, 10.0)


def test_a_lost_coordinator_fails_what_is_in_flight(engines: Engines) -> None:
    engines.send("p1")
    engines.offer("d2", ROOM + 1)
    engines.coordinator.process.kill()
    engines.coordinator.wait()
    engines.prefill.until_quiet("p1", timeout_s=20.0)
    engines.decode.until_quiet("d2", timeout_s=20.0)
    assert (engines.prefill.failed, engines.decode.failed) == (["p1"], ["d2"])


def test_what_cannot_be_said_fails_at_once(engines: Engines) -> None:
    engines.send("p1")
    for client in engines.clients:
        client.close()
    engines.send("p2", ROOM + 1)
    engines.offer("d2", ROOM + 1)
    engines.prefill.until_quiet("p2")
    engines.decode.until_quiet("d2")
    # Of the first one the coordinator knows: nobody can say that its pages are quiet.
    assert engines.prefill.failed == ["p1", "p2"]
