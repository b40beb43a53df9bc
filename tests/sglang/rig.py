"""The test's side: a host with SGLang in it, a coordinator, engines, and a decode side that listens."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]
#: A step is some milliseconds; processes share two cores with others.
PATIENCE_S: Final = 60.0


#: The bounds of the coordinators here.
#: Some tests wait for it; on all others it must not be upon, however busy the host.
DEADLINE_S: Final = 5.0
SETTLE_S: Final = 0.5


class End(NamedTuple):
    """How a request was retired, on all ranks."""

    step: int
    kind: str
    message: str


def outcome(reports: list[dict[str, Any]], room: int) -> End:
    """How a room ended: in the same step, in the same way, on all ranks, which gave its pages back then."""
    ends = [End(*report["done"][str(room)]) for report in reports]
    assert len({end[:2] for end in ends}) == 1, f"the ranks differ: {ends}"
    assert {report["freed"][str(room)] for report in reports} == {ends[0].step}
    return ends[0]


def wait(duration_s: float) -> None:
    """Let time pass in which something must not happen."""
    time.sleep(duration_s)


def until(condition: Callable[[], Any], what: str, bound_s: float = PATIENCE_S) -> Any:
    """Wait for a condition; returns what it returned."""
    end_s = time.monotonic() + bound_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {bound_s:g} s: {what}"
        time.sleep(0.02)
    return found


def python_with_sglang() -> str | None:
    """The python of the environment that ``scripts/sglang-env`` makes; None where it was not made."""
    found = subprocess.run(
        [str(ROOT / "scripts" / "sglang-env"), "--if-there"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None if found.returncode == 0 else None


def write_metadata(place: Path) -> None:
    """Write the part of our package's metadata by which SGLang's own loader finds the plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = place / "kv_coordinator-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))


class Host:
    """The process that has imported SGLang."""

    def __init__(self, python: str, place: Path) -> None:
        write_metadata(place / "site")
        # What is written there comes first: a checkout may hold metadata of an earlier installation.
        environment = dict(os.environ, PYTHONPATH=f"{place / 'site'}:{ROOT}", PYTHONWARNINGS="ignore")
        environment.pop("KV_COORDINATOR", None)
        self._log = (place / "host.log").open("wb")
        self._process = subprocess.Popen(
            [python, "-m", "tests.sglang.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
        )
        self._place = place
        try:
            assert self._answer() == "ready"
        except json.JSONDecodeError as error:
            raise AssertionError((place / "host.log").read_text()) from error

    def fork(self, **wanted: Any) -> list[int]:
        """Have the ranks of an engine started; returns their pids."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()
        return list(self._answer())

    def close(self) -> None:
        """End it, and what it has forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Coordinator:
    """``kv-coordinator serve`` for engines that move the pages by themselves."""

    _numbers = itertools.count(1)

    def __init__(self, place: Path, deadline_s: float = DEADLINE_S, unproven_s: float | None = None) -> None:
        place = place / f"c{next(Coordinator._numbers)}"
        place.mkdir()
        self.address = f"ipc://{place}/control"
        text = f"""
            [backend]
            name = "external"
            [listen]
            control = ["{self.address}"]
            outcomes = ["ipc://{place}/outcomes"]
            [http]
            address = "127.0.0.1:0"
            [handoff]
            deadline_s = {deadline_s}
            [release]
            settle_s = {SETTLE_S}
            {"" if unproven_s is None else f"unproven_s = {unproven_s}"}
            [rank]
            heartbeat_s = 0.2
            lost_after_s = 5.0
            reattach_s = 2.0
        """
        self._file = place / "coordinator.toml"
        self._file.write_text(text)
        self._log = (place / "coordinator.log").open("ab")
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coordinator", "serve", "--config", str(self._file)],
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            # What one that is killed leaves behind goes with the rest.
            env=dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(self._file.parent)),
        )

    def ask(self, path: str) -> Any:
        """What it says over HTTP."""
        found: list[str] = []

        def ready() -> bool:
            text = (self._file.parent / "coordinator.log").read_text()
            since_its_start = text.rpartition('"coordinator.ready"')[2]
            found[:] = re.findall(r'"event":"http.ready".*?"url":"([^"]+)"', since_its_start)
            return bool(found)

        until(ready, "its HTTP")
        with urllib.request.urlopen(found[0] + path, timeout=PATIENCE_S) as answer:  # noqa: S310 - our own
            return json.load(answer)

    def holds_nothing(self) -> bool:
        """Whether it is ready, and no handoff holds pages."""
        status = self.ask("/v1/status")
        return bool(status["ready"]) and status["unreleased"] == 0

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def hurry(self) -> None:
        """Have it end now, in good order: the second signal cuts its grace short."""
        self._process.terminate()
        wait(0.3)
        self._process.terminate()
        self._process.wait(10.0)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()
        shutil.rmtree(self._file.parent)


class Engine:
    """The ranks of a prefill engine, and the decode side that they tell of failures."""

    _ports = itertools.count(1)

    def __init__(self, host: Host, place: Path, ranks: int, address: str = "") -> None:
        # ipc paths are short: 107 bytes at most.
        self.place = place / f"e{next(Engine._ports)}"
        self.place.mkdir()
        self._context = zmq.Context()
        self._decode = self._context.socket(zmq.PULL)
        port = self._decode.bind_to_random_port("tcp://127.0.0.1")
        self.ranks = ranks
        environment = {"KV_COORDINATOR": address} if address else {}
        host.fork(
            ranks=ranks, place=str(self.place), port=int(self.place.name[1:]), decode=port, env=environment
        )
        self._ears = [self._context.socket(zmq.REQ) for _ in range(ranks)]
        for rank, ear in enumerate(self._ears):
            ear.linger = 0
            ear.connect(f"ipc://{self.place}/rank-{rank}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.logs())
        else:
            self.say("stop")
            until(lambda: all(self.has_ended(rank) for rank in range(self.ranks)), "the end of all ranks")
        self._context.destroy(linger=0)
        shutil.rmtree(self.place, ignore_errors=kind is not None)

    def logs(self) -> str:
        """What the ranks have logged."""
        return "\n".join(
            f"--- rank {rank}\n{path.read_text()}"
            for rank in range(self.ranks)
            if (path := self.place / f"log-{rank}").exists()
        )

    def ask(self, rank: int, *words: Any) -> Any:
        """Say something to one rank."""
        ear = self._ears[rank]
        ear.send_json(words)
        until(lambda: ear.poll(20) or self.has_ended(rank), f"an answer of rank {rank} to {words}")
        assert ear.poll(0), f"rank {rank} has ended"
        return ear.recv_json()

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is over."""
        return (self.place / f"ended-{rank}").exists()

    def all(self, *words: Any) -> list[Any]:
        """Say something to each rank."""
        return [self.ask(rank, *words) for rank in range(self.ranks)]

    def say(self, command: str) -> None:
        """Have all ranks do something in the same step."""
        self.ask(0, "say", command)

    def reports(self) -> list[dict[str, Any]]:
        """What each rank has to report."""
        return self.all("report")

    def is_on(self) -> bool:
        """Whether the coordinator decides, on all ranks."""
        return all(report["switches"] and report["switches"][-1][1] for report in self.reports())

    def done(self, *rooms: int, bound_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Wait until all ranks have retired these rooms; returns their reports."""
        names = [str(room) for room in rooms]

        def found() -> list[dict[str, Any]] | None:
            reports = self.reports()
            return reports if all(name in report["done"] for report in reports for name in names) else None

        reports: list[dict[str, Any]] = until(found, f"rooms {rooms} retired by all ranks", bound_s)
        return reports

    def in_flight(self, *rooms: int) -> None:
        """Wait until all ranks have these rooms in flight."""
        until(
            lambda: all(set(rooms) <= set(report["in_flight"]) for report in self.reports()),
            f"{rooms} in flight",
        )

    def forget(self, room: int) -> str | None:
        """Have the ranks forget how a room has ended; returns how it had."""
        ends = self.all("forget", room)
        assert len(set(ends)) == 1
        return None if ends[0] is None else str(ends[0])

    def told_decode(self, count: int) -> list[list[bytes]]:
        """Wait until decode has been told so many things."""
        told: list[list[bytes]] = []
        while len(told) < count:
            assert self._decode.poll(int(PATIENCE_S * 1000)), f"decode was told no more than {told}"
            told.append(self._decode.recv_multipart())
        return told
