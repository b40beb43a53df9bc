"""All ranks of an engine do the same in every step, and can prove it.

Rank 0 decides a step and passes it on; the others apply exactly that one. A real engine has such
a broadcast of its own; here it is one PUSH socket for each follower: ordered, reliable, bounded.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from coordinator.sim.errors import LockstepError
from coordinator.sim.wire import Step, decode_step, encode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from coordinator.messages import Event

DIGEST_BYTES: Final = 16
#: Steps that rank 0 may be ahead of a follower.
MAX_AHEAD: Final = 256
#: Rank 0 makes an empty step after this long without one, so that silence means something.
HEARTBEAT_S: Final = 1.0


def step_address(directory: str, group: str, rank: int) -> str:
    """Where follower ``rank`` listens for its steps."""
    return f"ipc://{directory}/{group}-{rank}"


class StepSender:
    """Rank 0's end."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Connect to all followers; ``timeout_s`` bounds how long one may take no step."""
        self._context = zmq.Context()
        self._timeout_s = timeout_s
        self._number = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        for address in addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, MAX_AHEAD)
            socket.set(zmq.SNDTIMEO, round(timeout_s * 1000))
            socket.set(zmq.LINGER, round(timeout_s * 1000))
            # The follower may bind a little later than we connect.
            socket.set(zmq.RECONNECT_IVL, 10)
            socket.connect(address)
            self._sockets.append(socket)

    def send(self, step: Step) -> None:
        """Pass one step on to every follower.

        Raises:
            LockstepError: a follower has taken no step for ``timeout_s``.

        """
        _check_number(self._number + 1, step)
        self._number = step.number
        frame = encode(step)
        for rank, socket in enumerate(self._sockets, start=1):
            try:
                socket.send(frame)
            except zmq.Again:
                message = f"rank {rank} has taken no step for {self._timeout_s:g} s; step {step.number} waits"
                raise LockstepError(message) from None

    def close(self) -> None:
        """Wait, within the bound, until all steps are handed over; then close."""
        self._context.destroy(round(self._timeout_s * 1000))

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error without waiting."""
        self._context.destroy(0 if error else round(self._timeout_s * 1000))


class StepReceiver:
    """A follower's end."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Listen; ``timeout_s`` bounds the wait for a step."""
        self._context = zmq.Context()
        self._timeout_s = timeout_s
        self._number = 0
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self.socket.set(zmq.RCVHWM, MAX_AHEAD)
        self.socket.bind(address)

    def receive(self) -> Step:
        """Wait for the next step.

        Raises:
            LockstepError: none came within ``timeout_s``, or not the one that is due.

        """
        if not self.socket.poll(round(self._timeout_s * 1000)):
            message = f"no step from rank 0 for {self._timeout_s:g} s, after step {self._number}"
            raise LockstepError(message)
        step = decode_step(self.socket.recv())
        _check_number(self._number + 1, step)
        self._number = step.number
        return step

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(0)

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class RollingDigest:
    """A digest over everything that a rank has applied so far."""

    def __init__(self) -> None:
        """Nothing was applied yet."""
        self._state = blake2b(digest_size=DIGEST_BYTES)

    def update(self, step: int, events: Sequence[Event], allocator: bytes) -> None:
        """Add one step: its number, the events applied in it, the allocator's digest after it."""
        self._state.update(step.to_bytes(8, "little"))
        self._state.update(msgspec.msgpack.encode(events))
        self._state.update(allocator)

    @property
    def value(self) -> bytes:
        """16 bytes that differ when anything applied did."""
        return self._state.copy().digest()


def _check_number(due: int, step: Step) -> None:
    if step.number != due:
        message = f"step {due} is due, this is step {step.number}"
        raise LockstepError(message)
