"""The first contact of a mooncake engine with a peer's, before anything depends on it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from backends.base import BackendError

if TYPE_CHECKING:
    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_engine import Engine

#: Length of the scrap of memory that every backend keeps for this.
SCRAP_BYTES: Final = 8
_POLL_S: Final = 0.0002


def warm_up(engine: Engine, remote: Endpoint, scrap: int, timeout_s: float) -> None:
    """Make the connection: call the peer's engine, and write our scrap onto its scrap.

    In a thread, for either call takes a minute when the peer stops at that very moment. When this
    raises because of the time, the thread holds the engine as long as that lasts.

    Args:
        engine: ours, with ``scrap`` registered; not to be used by others meanwhile.
        remote: the peer's endpoint.
        scrap: address of ``SCRAP_BYTES`` of ours.
        timeout_s: how long it may take.

    Raises:
        BackendError: the engine there does not answer, or not in time.

    """
    problems: list[str] = []
    end_s = time.monotonic() + timeout_s

    def meet() -> None:
        try:
            problems.append(_meet(engine, remote, scrap, end_s))
        except BackendError as error:
            problems.append(str(error))

    thread = threading.Thread(target=meet, name=f"mooncake meets {remote.engine}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    problem = problems[0] if problems else f"its engine did not answer within {timeout_s:g} s"
    if problem:
        raise BackendError(problem)


def _meet(engine: Engine, remote: Endpoint, scrap: int, end_s: float) -> str:
    """Do what ``warm_up`` says, until ``end_s``; what went wrong, or nothing."""
    engine.probe(remote.engine)
    if time.monotonic() > end_s:
        return "its engine answered too late"
    number = engine.submit(remote.engine, scrap, remote.scrap, SCRAP_BYTES)
    while (done := engine.ended(number)) is None:
        if time.monotonic() > end_s:
            return "its engine did not take a write in time"
        time.sleep(_POLL_S)
    return "" if done else "its engine takes no writes; the messages of ours are on stderr"
