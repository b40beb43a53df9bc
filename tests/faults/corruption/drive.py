"""What is done to a pair of engines: requests, aborts, and a decode engine that is stopped again and again."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Final

from coordinator.layout import Layout
from coordinator.messages import Role
from coordinator.sim.cluster import Cluster
from coordinator.sim.options import ClusterOptions
from coordinator.sim.wire import Request
from tests.faults.corruption.rank import FOUND, HASTY

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.sim.forks import ForkServer

DEADLINE_S: Final = 0.6
SETTLE_S: Final = 0.4
DRAIN_S: Final = 0.4
HEARTBEAT_S: Final = 0.1
#: On each plane 256 KiB of a page, on four planes.
_LAYOUT: Final = Layout(layers=2, page_tokens=2048, kv_heads=1, head_size=64, dtype="bfloat16")
_PAGES: Final = 40
_MAX_PAGES: Final = 12
_CONCURRENCY: Final = 6
_ABORTED: Final = 0.3
_ABORT_WITHIN_S: Final = 0.05
_PATIENCE_S: Final = 30.0
#: How long decode stands still: it goes on before the deadline, before the fence, after it.
_STOPS_S: Final = ((0.02, 0.3), (DEADLINE_S + 0.05, DEADLINE_S + 0.3), (DEADLINE_S + SETTLE_S + 0.1, 1.5))


def options(backend: str, backend_options: dict[str, str], hasty: Role | None) -> ClusterOptions:
    """Build a deployment whose bounds are short; ``hasty`` is the role that does not wait for the release."""
    return ClusterOptions(
        backend=backend,
        layout=_LAYOUT,
        pages=_PAGES,
        options=backend_options,
        coordinator={
            "handoff": {"deadline_s": DEADLINE_S},
            "release": {"settle_s": SETTLE_S, "drain_s": DRAIN_S},
            "rank": {"heartbeat_s": HEARTBEAT_S, "lost_after_s": 10.0},
        },
        environment={HASTY: "" if hasty is None else hasty.value},
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

    def __enter__(self) -> Corruption:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    @property
    def reasons(self) -> Counter[str | None]:
        return Counter(handoff.outcome for handoff in self.book.settled)

    def run(self, handoffs: int, stops: int) -> None:
        """Hand everything over, and stop decode so often meanwhile."""
        self.prefill = self.cluster.add(Role.PREFILL, "prefill-0", 1)
        self.decode = self.cluster.add(Role.DECODE, "decode-0", 1)
        self.cluster.wait_ready()
        for stop in range(stops):
            self._feed(handoffs // stops)
            self._stop(self._random.uniform(*_STOPS_S[stop % len(_STOPS_S)]))
        self._feed(handoffs - stops * (handoffs // stops))
        self._until(lambda: not self.book.open, "every handoff to be over on every rank")
        self.cluster.finish(_PATIENCE_S)

    def found(self) -> list[str]:
        """What the engines have seen that must not be."""
        logs = sorted(self.cluster.directory.glob("*-*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return [line for line in lines if line.startswith(FOUND)]

    def fences(self) -> int:
        """How often a link was destroyed to make pages quiet."""
        return self.cluster.coordinator.log_path.read_text().count('"release.fence"')

    def _feed(self, count: int) -> None:
        for _ in range(count):
            self._until(lambda: len(self.book.open) < _CONCURRENCY, "a handoff to be over")
            self._submit()

    def _submit(self) -> None:
        random = self._random
        pages = random.randint(2, _MAX_PAGES)
        request = Request(next(self._rooms), pages, chunk_pages=math.ceil(pages / random.randint(1, 3)))
        self.cluster.hand_off([request], self.prefill, self.decode)
        if random.random() < _ABORTED:
            group = random.choice((self.prefill, self.decode))
            self._after(
                random.uniform(0.0, _ABORT_WITHIN_S), lambda: group.cancel([request.room], "as the test says")
            )

    def _stop(self, duration_s: float) -> None:
        """Let decode stand still, with pages on their way to it."""
        begun = list(self.book.open.values())[-1]
        self._until(lambda: begun.in_flight or begun.outcome is not None, "the last handoff to be under way")
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
