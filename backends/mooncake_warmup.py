"""The first contact of a mooncake engine with a peer's, before anything depends on it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from backends.base import BackendError
from backends.mooncake_engine import LANES

if TYPE_CHECKING:
    from backends.mooncake_endpoint import Endpoint
    from backends.mooncake_engine import Engine

#: Length of the scrap of memory that every backend keeps for this.
SCRAP_BYTES: Final = 8
_POLL_S: Final = 0.0002
#: A thread that is not stuck notices within this that its time is over, and says how far it came.
_NOTICE_S: Final = 0.2
#: An engine makes a connection when it has more to do than connections, one after the other.
_READS: Final = 4 * LANES


def warm_up(engine: Engine, remote: Endpoint, scrap: int, timeout_s: float) -> None:
    """Make all connections of ``engine`` to the peer's engines: call each, and read its scrap.

    From then on the engine connects no more, as long as it has no more to do at a time than it has
    connections. Reading harms nobody, whoever it is that listens there.

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

    thread = threading.Thread(target=meet, name=f"mooncake meets {remote.agent}", daemon=True)
    thread.start()
    thread.join(timeout_s + _NOTICE_S)
    problem = problems[0] if problems else f"its engine did not answer within {timeout_s:g} s"
    if problem:
        raise BackendError(problem)


def _meet(engine: Engine, remote: Endpoint, scrap: int, end_s: float) -> str:
    """Do what ``warm_up`` says, until ``end_s``; what went wrong, or nothing."""
    for theirs in remote.engines:
        name = remote.name(theirs)
        engine.probe(name)
        if time.monotonic() > end_s:
            return "its engine answered too late"
        wanted = LANES if remote.protocol == "tcp" else 0
        has = -1
        while has < wanted:
            problem = _read(engine, name, remote.scrap, scrap, end_s)
            has = engine.connections(remote.host, theirs.data_port)
            if problem:
                return f"{problem}; {has} of {wanted} connections are made"
    return ""


def _read(engine: Engine, name: str, theirs: int, ours: int, end_s: float) -> str:
    """Read more at a time than there are connections, so that the engine makes those that it lacks."""
    moving = {engine.submit_read(name, ours, theirs, SCRAP_BYTES) for _ in range(_READS)}
    failed = False
    while moving:
        for number, done in engine.ended(moving):
            moving.remove(number)
            failed = failed or not done
        if time.monotonic() > end_s:
            return "its engine did not answer in time"
        time.sleep(_POLL_S)
    return "its engine cannot be read; the messages of ours are on stderr" if failed else ""
