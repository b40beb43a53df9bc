"""A ZeroMQ stream (ZMTP 3), cut into messages without being a party to it. Only without encryption.

After a greeting of 64 bytes come frames: a byte of flags, the length in one byte or in eight, the
body. Frames that are marked as commands (handshake, heartbeats) belong to the connection and stay
where they are; the others make messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

GREETING_BYTES: Final = 64
MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
_SHORT_MAX: Final = 255

Message = list[bytes]


class Rewrite(Protocol):
    """Says what arrives instead of a message: nothing, it, another one, or several."""

    def __call__(self, message: Message, /) -> list[Message]:
        """Take the frames of one message; return messages."""


class Splitter:
    """One direction of one connection; each of its messages goes through ``rewrite``."""

    def __init__(self, rewrite: Callable[[Message], list[Message]]) -> None:
        self._rewrite = rewrite
        self._greeting_left = GREETING_BYTES
        self._pending = b""
        self._frames: Message = []

    def feed(self, data: bytes) -> bytes:
        """Take what was sent; returns what arrives. A part of a frame waits for the rest of it."""
        greeting = data[: self._greeting_left]
        self._greeting_left -= len(greeting)
        self._pending += data[len(greeting) :]
        arrived = [greeting]
        while (frame := self._next_frame()) is not None:
            flags, body, raw = frame
            if flags & COMMAND:
                arrived.append(raw)
                continue
            self._frames.append(body)
            if not flags & MORE:
                message, self._frames = self._frames, []
                arrived += [encode(changed) for changed in self._rewrite(message)]
        return b"".join(arrived)

    def _next_frame(self) -> tuple[int, bytes, bytes] | None:
        """Take the next whole frame: its flags, its body, and all of it as it came."""
        data = self._pending
        header = 9 if data and data[0] & LONG else 2
        if len(data) < header:
            return None
        end = header + int.from_bytes(data[1:header], "big")
        if len(data) < end:
            return None
        self._pending = data[end:]
        return data[0], data[header:end], data[:end]


def encode(message: Message) -> bytes:
    """Write the frames of a message as they travel."""
    parts = []
    for index, body in enumerate(message):
        flags = MORE if index < len(message) - 1 else 0
        if len(body) > _SHORT_MAX:
            parts.append(bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body)
        else:
            parts.append(bytes([flags, len(body)]) + body)
    return b"".join(parts)
