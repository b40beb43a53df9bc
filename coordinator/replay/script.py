"""What goes wrong when: a TOML file, with a list for each kind of fault. configs/replay/restarts.toml is one.

- ``[[restart]]``: all ranks of the engine ``group`` are killed (SIGKILL), and it is started again.
- ``[[stop]]``: ``rank`` of ``group`` stands still (SIGSTOP) for ``for_s``, and goes on.
- ``[[abort]]``: so many ``requests`` are given up, the longest in flight, ``by`` prefill or decode.

Each has ``at_s``, in seconds of the trace. ``for_s`` is in seconds of the clock, whatever the speed: the
bounds that it meets are, too.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from coordinator.replay.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: A year; what is to happen never, or later than anybody waits, would hold the run up.
_LATEST_S: Final = 366 * 86_400
_Moment = Annotated[float, msgspec.Meta(ge=0, le=_LATEST_S)]


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine is killed and started again, see the module."""

    at_s: _Moment
    group: str

    def __str__(self) -> str:
        return f"{self.group} is killed and started again"


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank stands still for a while, see the module."""

    at_s: _Moment
    group: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    for_s: Annotated[float, msgspec.Meta(gt=0, le=60)]

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} stands still for {self.for_s:g} s"


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests are given up, see the module."""

    at_s: _Moment
    by: Literal["prefill", "decode"]
    requests: Annotated[int, msgspec.Meta(ge=1)]

    def __str__(self) -> str:
        return f"{self.by} gives up to {self.requests} requests up"


Fault = Restart | Stop | Abort


class _Script(msgspec.Struct, forbid_unknown_fields=True):
    restart: list[Restart] = []
    stop: list[Stop] = []
    abort: list[Abort] = []


def read(path: Path, world_sizes: Mapping[str, int]) -> list[Fault]:
    """Read a script, for engines of these names and numbers of ranks; what comes first comes first.

    Raises:
        ReplayError: it cannot be read, says something else, or names an engine or rank that is not there.

    """
    try:
        script = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Script)
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise ReplayError(message) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        message = f"{path}: {error}"
        raise ReplayError(message) from error
    faults: list[Fault] = [*script.restart, *script.stop, *script.abort]
    for fault in faults:
        if not isinstance(fault, Abort):
            _check(fault, world_sizes, path)
    return sorted(faults, key=lambda fault: fault.at_s)


def _check(fault: Restart | Stop, world_sizes: Mapping[str, int], path: Path) -> None:
    if fault.group not in world_sizes:
        message = f"{path}: there is no engine {fault.group!r}; there are {', '.join(world_sizes)}"
        raise ReplayError(message)
    if isinstance(fault, Stop) and fault.rank >= world_sizes[fault.group]:
        message = f"{path}: {fault.group} has no rank {fault.rank}, but {world_sizes[fault.group]} ranks"
        raise ReplayError(message)
