"""Messages to bytes and back; every frame is validated."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from coordinator.errors import ProtocolError
from coordinator.messages.bounds import VERSION
from coordinator.messages.ranks import Broadcast, Bye, Hello, Refused, Resend, Submit, Welcome, WhoAreYou
from coordinator.messages.workers import Commands, Reports, Stop, WorkerBye, WorkerHello

#: How much of what is wrong with a frame is told; the answer and the log line stay small.
MAX_QUOTED: Final = 256

FromPeer = Hello | Submit | Bye | WorkerHello | WorkerBye | Reports
ToRank = Welcome | Refused | WhoAreYou | Resend
ToWorker = Commands | Refused | Stop

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_from_peer = msgspec.msgpack.Decoder(FromPeer)
_to_rank = msgspec.msgpack.Decoder(ToRank)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_broadcast = msgspec.msgpack.Decoder(Broadcast)

encode = _encoder.encode

#: What a decoder raises on bad input; msgspec lets nesting that is too deep out as it is.
_MALFORMED: Final = (msgspec.MsgspecError, RecursionError)


def decode_from_peer(frame: bytes) -> FromPeer:
    """Decode what a rank or a worker sent.

    Raises:
        ProtocolError: the frame is malformed, or a ``Hello`` of another protocol version.

    """
    try:
        return _from_peer.decode(frame)
    except _MALFORMED as error:
        message = _foreign_version(frame) or _complaint(error)
        raise ProtocolError(message) from error


def decode_to_rank(frame: bytes) -> ToRank:
    """Decode what the coordinator sent to a rank on its control connection."""
    return _decode(_to_rank, frame)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Decode what the coordinator sent to a worker."""
    return _decode(_to_worker, frame)


def decode_broadcast(frame: bytes) -> Broadcast:
    """Decode the second frame of a broadcast."""
    return _decode(_broadcast, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except _MALFORMED as error:
        raise ProtocolError(_complaint(error)) from error


def _complaint(error: Exception) -> str:
    """Say what is wrong; a decoder may quote what it met, at any length."""
    text = str(error)
    return f"malformed message: {text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + ' ...'}"


def _foreign_version(frame: bytes) -> str | None:
    """Name both versions when the frame is a Hello of another protocol, whose fields may differ."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except _MALFORMED:
        return None
    match fields:
        case [str("hello" | "worker"), int(version), *_] if version != VERSION:
            return f"protocol version {version} is not spoken here; this coordinator speaks {VERSION}"
        case _:
            return None
