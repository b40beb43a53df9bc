"""What is done to a pair of engines: requests, aborts, and a decode engine that stands still at times."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Final, Self

import pytest

from coordinator.layout import Layout
from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.options import ClusterOptions
from coordinator.sim.wire import Request
from tests.faults.corruption.rank import FOUND, HASTY

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.sim.book import Handoff
    from coordinator.sim.forks import ForkServer

DEADLINE_S: Final = 0.6
SETTLE_S: Final = 0.6
DRAIN_S: Final = 0.4
HEARTBEAT_S: Final = 0.1
REATTACH_S: Final = 1.0
#: On each plane 256 KiB of a page, on four planes.
_LAYOUT: Final = Layout(layers=2, page_tokens=2048, kv_heads=1, head_size=64, dtype="bfloat16")
_PAGES: Final = 40
_MAX_PAGES: Final = 7
_CONCURRENCY: Final = 8
#: Large prompts: together more than all socket buffers on the way hold.
_LARGE_PAGES: Final = 13
_LARGE_CHUNK_STEPS: Final = 50
#: The kernel may let a socket of nixl's have room for all of a pool, and then nothing is stuck.
_SMALL_BUFFERS: Final = {"UCX_TCP_SNDBUF": "256k", "UCX_TCP_RCVBUF": "256k"}
#: How often to try to catch some of them on their way.
_HOLD_UPS: Final = 5
_ABORTED: Final = 0.3
_ABORT_WITHIN_S: Final = 0.05
_PATIENCE_S: Final = 30.0
#: How long decode stands still: it goes on before the deadline, before the fence, after it.
_STOPS_S: Final = (
    (0.02, 0.3),
    (DEADLINE_S + 0.05, DEADLINE_S + 0.3),
    (DEADLINE_S + SETTLE_S + 0.1, DEADLINE_S + SETTLE_S + 0.4),
)


def options(backend: str, its_options: dict[str, str], hasty: Role | None = None) -> ClusterOptions:
    """Build a deployment whose bounds are short; ``hasty`` is the role that does not wait for the release."""
    return ClusterOptions(
        backend=backend,
        layout=_LAYOUT,
        pages=_PAGES,
        options=its_options,
        coordinator={
            "handoff": {"deadline_s": DEADLINE_S},
            "release": {"settle_s": SETTLE_S, "drain_s": DRAIN_S},
            "rank": {"heartbeat_s": HEARTBEAT_S, "lost_after_s": 10.0, "reattach_s": REATTACH_S},
        },
        environment={HASTY: "" if hasty is None else hasty.value, **_SMALL_BUFFERS},
        program="tests.faults.corruption.rank",
    )


class Corruption:
    """One run; a context manager.

    Attributes:
        cluster: the deployment.
        reasons: how often handoffs ended in which way; the empty reason is success.

    """

    def __init__(self, options: ClusterOptions, forks: ForkServer, seed: int) -> None:
        self.cluster = Cluster(options, forks)
        self.book = self.cluster.book
        self._random = Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._rooms = count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    @property
    def reasons(self) -> Counter[str | None]:
        return Counter(handoff.outcome for handoff in self.book.settled)

    def start(self) -> None:
        """Start the engines, and let them meet."""
        self.prefill = self.cluster.add(Role.PREFILL, "prefill-0", 1)
        self.decode = self.cluster.add(Role.DECODE, "decode-0", 1)
        self.cluster.wait_ready()
        while not self.reasons[""]:  # the first contact may take longer than the deadline
            self._hand_over(1, 1)
            self._settle()

    def hold_up(self, *, until_fenced: bool = False) -> None:
        """Fail handoffs whose bytes are stuck on their way; these go on before the fence, or after it."""
        for _ in range(_HOLD_UPS):
            fences = self.fences()
            handoffs = self._hand_over_large()
            self.decode.stop(0)
            self._until_prefill_has_heard(handoffs)
            caught = any(handoff.outcome == "deadline" for handoff in handoffs)
            if caught and until_fenced:
                self._until(partial(self._fenced_since, fences), "a fence")
            self.decode.cont(0)
            self._settle()
            if caught:
                return
        pytest.fail("every large handoff was over before decode could be stopped: this host is too busy")

    def replace_coordinator(self) -> None:
        """Kill the coordinator, and with it the worker, in the middle; decode stands still meanwhile."""
        handoffs = self._hand_over_large()
        self.decode.stop(0)
        self.cluster.coordinator.kill()
        self.cluster.coordinator.start()
        self._until_prefill_has_heard(handoffs)
        self.decode.cont(0)
        self._settle()

    def replace_decode(self) -> None:
        """Kill decode in the middle, and start it anew: it may get the same ports and addresses."""
        handoffs = self._hand_over_large()
        self.decode.kill()
        self.decode.start()
        self._until(lambda: self.decode.is_ready, "the new decode engine to be ready")
        orphans = [handoff.request.room for handoff in handoffs if handoff.waiting]
        self.prefill.cancel(orphans, "its decode engine was restarted")
        self._settle()

    def storm(self, handoffs: int, stops: int) -> None:
        """Hand rooms over, give some of them up, and stop decode now and then."""
        for stop in range(stops):
            for _ in range(handoffs // stops):
                self._until(lambda: len(self.book.open) < _CONCURRENCY, "a handoff to be over")
                self._submit()
            self._stop(self._random.uniform(*_STOPS_S[stop % len(_STOPS_S)]))
        self._settle()

    def finish(self) -> None:
        """End the engines, which look at all their pages once more."""
        self.cluster.finish(_PATIENCE_S)

    def _settle(self) -> None:
        self._until(lambda: not self.book.open, "every handoff to be over on every rank")

    def found(self) -> list[str]:
        """What the engines have seen that must not be."""
        logs = sorted(self.cluster.directory.glob("*-*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return [line for line in lines if line.startswith(FOUND)]

    def fences(self) -> int:
        """How often a link was destroyed to make pages quiet."""
        return self.cluster.coordinator.log_path.read_text().count('"release.fence"')

    def _fenced_since(self, before: int) -> bool:
        return self.fences() > before

    def _hand_over_large(self) -> list[Handoff]:
        """Have as many large prompts under way as fit, each with its second half still to come."""
        large = range(_PAGES // _LARGE_PAGES)
        rooms = [self._hand_over(_LARGE_PAGES, 2, _LARGE_CHUNK_STEPS) for _ in large]
        handoffs = [self.book.open[room] for room in rooms]
        self._until(lambda: _all_begun(handoffs), "all to be under way")
        return handoffs

    def _until_prefill_has_heard(self, handoffs: list[Handoff]) -> None:
        """Wait until only decode, which is stopped, lacks the outcomes."""
        stopped = {(self.decode.party, 0)}
        self._until(
            lambda: all(handoff.waiting <= stopped for handoff in handoffs), "prefill to hear of their ends"
        )

    def _hand_over(self, pages: int, chunks: int, chunk_steps: int = 1) -> int:
        room = next(self._rooms)
        request = Request(room, pages, math.ceil(pages / chunks), chunk_steps)
        self.cluster.hand_off([request], self.prefill, self.decode)
        return room

    def _submit(self) -> None:
        random = self._random
        room = self._hand_over(random.randint(1, _MAX_PAGES), random.randint(1, 3))
        if random.random() < _ABORTED:
            group = random.choice((self.prefill, self.decode))
            delay_s = random.uniform(0.0, _ABORT_WITHIN_S)
            self._after(delay_s, lambda: group.cancel([room], "as the test says"))

    def _stop(self, duration_s: float) -> None:
        """Let decode stand still, with pages on their way to it."""
        last = list(self.book.open.values())[-1:]
        self._until(lambda: _all_begun(last), "the last handoff to be under way")
        self.decode.stop(0)
        over: list[bool] = []
        self._after(duration_s, lambda: over.append(True))
        self._until(lambda: bool(over), "the stop to be over")
        self.decode.cont(0)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), action))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Pump, and do what is due, until something holds."""

        def look() -> bool:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            return condition()

        deadline_s = time.monotonic() + _PATIENCE_S
        while not look():
            assert time.monotonic() < deadline_s, f"waited {_PATIENCE_S:g} s for {what}: {self._missing()}"
            next_s = self._due[0][0] - time.monotonic() if self._due else 0.1
            self.cluster.pump(min(max(next_s, 0.001), 0.1))

    def _missing(self) -> str:
        missing = "\n".join(handoff.missing() for handoff in self.book.open.values())
        return f"{missing}\nthe coordinator's last lines:\n{self.cluster.coordinator.tail()}"


def _all_begun(handoffs: list[Handoff]) -> bool:
    return all(handoff.in_flight or handoff.outcome is not None for handoff in handoffs)
