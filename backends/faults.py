"""Scripted faults of the loopback backend: declared as data, by tests and by operators who rehearse.

A fault is a table in TOML or a dict, for example in a configuration file::

    [backend.options.loopback]
    control = "/run/kv-coordinator/faults.toml"
    [[backend.options.loopback.faults]]
    kind = "stall"
    peer = "decode-1*"
    nth = 3
    after_bytes = 65536
    for_s = 2.0

The *control file*, when one is named, replaces the list while the process runs: its tables are
``[[faults]]`` of the same form. Replace it atomically (write beside it, rename). No file means no
faults. Counting of writes and connects starts anew with each new content, and a transfer that
stalls or is slow because of the file goes on when the file does not say so any more.

Kinds, and at which call they strike:
    refuse      connect, write   the call raises; nothing was posted
    hang        connect, write   the call never returns
    crash       connect, write   the process aborts, for a write after ``after_bytes``
    fail        write            the transfer fails after ``after_bytes``; it settles ``settle_s`` later,
                                 and its remaining bytes still land at that very moment
    disconnect  write            the same, with the error of a lost peer
    stall       write            nothing moves after ``after_bytes``, for ``for_s``
    slow        write            ``bytes_per_s``
"""

from __future__ import annotations

import logging
import threading
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from backends.base import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

Call = Literal["connect", "write"]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Fault(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One scripted fault.

    Attributes:
        kind: what happens.
        on: at which call.
        peer: which peers, as a shell pattern.
        nth: strike only at the n-th such call towards a peer (from 1); ``None``: at every one.
        after_bytes: for a write, how much is copied before it strikes (rounded down to blocks).
        for_s: how long a stall lasts.
        settle_s: time between a failure and its settling.
        bytes_per_s: pace of a slow write.

    """

    kind: Literal["refuse", "hang", "crash", "fail", "disconnect", "stall", "slow"]
    on: Call = "write"
    peer: str = "*"
    nth: Annotated[int, Meta(ge=1)] | None = None
    after_bytes: Annotated[int, Meta(ge=0)] = 0
    for_s: Positive = float("inf")
    settle_s: NotNegative = 0.0
    bytes_per_s: Positive = 1e6

    def __post_init__(self) -> None:
        """Refuse a kind that cannot strike at this call."""
        if self.on == "connect" and self.kind not in {"refuse", "hang", "crash"}:
            message = f"kind {self.kind!r} cannot strike on connect"
            raise ValueError(message)


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of the loopback backend."""

    faults: tuple[Fault, ...] = ()
    control: str = ""


class _ControlFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a control file."""

    faults: tuple[Fault, ...] = ()


class FaultScript:
    """The faults in force, and how often each peer was called since they are."""

    def __init__(self, options: Mapping[str, object]) -> None:
        """Check the options.

        Raises:
            BackendError: naming the option that is unknown or has an impossible value.

        """
        try:
            checked = msgspec.convert(dict(options), Options)
        except msgspec.ValidationError as error:
            message = f"loopback options: {error}"
            raise BackendError(message) from error
        self._faults = checked.faults
        self._control = Path(checked.control) if checked.control else None
        self._control_stamp: tuple[int, int] | None = None
        self._calls: dict[tuple[Call, str], int] = {}
        self._complaint = ""
        # Links of several threads share one script.
        self._lock = threading.Lock()

    def strikes(self, call: Call, peer: str) -> Fault | None:
        """Count one call towards ``peer``; the first fault that strikes it, if any.

        Raises:
            BackendError: the control file cannot be used.

        """
        with self._lock:
            self._reread()
            number = self._calls[call, peer] = self._calls.get((call, peer), 0) + 1
            for fault in self._faults:
                if fault.on == call and fault.nth in {None, number} and fnmatchcase(peer, fault.peer):
                    return fault
        return None

    def in_force(self, fault: Fault) -> bool:
        """Whether a fault that struck earlier is still in the script."""
        with self._lock:
            try:
                self._reread()
            except BackendError as error:
                # For whoever polls a transfer, which must not raise, what was read last counts.
                if str(error) != self._complaint:
                    logger.warning("%s; what was in it before is still in force", error)
                self._complaint = str(error)
            return fault in self._faults

    def _reread(self) -> None:
        """Take the control file's content when it changed since the last look."""
        if self._control is None:
            return
        try:
            found = self._control.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._control_stamp:
                return
            content = msgspec.convert(tomllib.loads(self._control.read_text("utf-8")), _ControlFile)
        except FileNotFoundError:
            stamp, content = (0, 0), _ControlFile()
        except (OSError, ValueError) as error:
            message = f"control file {self._control}: {error}"
            raise BackendError(message) from error
        if stamp != self._control_stamp:
            self._control_stamp = stamp
            self._faults = content.faults
            self._calls.clear()
