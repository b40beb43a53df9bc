"""Tells decode that requests have failed, off the scheduler's thread: SGLang's send may block for 30 s.

Each decode endpoint has a thread of its own while there is something to tell it, so that a dead one
holds up no other.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from coordinator.integrations.sglang.watched import Target

#: How many failures may wait for one endpoint. Beyond that it learns by its own time-out.
MAX_WAITING: Final = 4096
#: A thread ends when there was nothing to tell for this long.
IDLE_S: Final = 30.0

logger = logging.getLogger(__name__)


class Herald:
    """Calls ``tell(target, room, reason)`` on other threads."""

    def __init__(self, tell: Callable[[Target, int, str], None]) -> None:
        """Start no thread yet."""
        self._tell = tell
        self._lock = threading.Lock()
        self._lanes: dict[Target, queue.Queue[tuple[int, str]]] = {}

    def failed(self, targets: Iterable[Target], room: int, reason: str) -> None:
        """Have all ``targets`` told; returns at once."""
        for target in targets:
            with self._lock:
                lane = self._lanes.get(target)
                if lane is None:
                    lane = self._lanes[target] = queue.Queue(MAX_WAITING)
                    name = f"kv-herald-{target[0]}:{target[1]}"
                    threading.Thread(target=self._run, args=(target, lane), name=name, daemon=True).start()
                try:
                    lane.put_nowait((room, reason))
                except queue.Full:
                    logger.warning(
                        "%s:%d cannot be told that room %d has failed: too many wait", *target, room
                    )

    def _run(self, target: Target, lane: queue.Queue[tuple[int, str]]) -> None:
        while True:
            try:
                room, reason = lane.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if lane.empty():
                        del self._lanes[target]
                        return
                continue
            try:
                self._tell(target, room, reason)
            except Exception as error:  # noqa: BLE001 - the thread's door: SGLang's own code, decode may be dead
                logger.warning("%s:%d cannot be told that room %d has failed: %r", *target, room, error)
