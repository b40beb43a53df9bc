"""Between workers and the coordinator."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from coordinator.layout import Layout
from coordinator.messages.bounds import MAX_ITEMS, U64, Count, Text

# --- worker -> coordinator -------------------------------------------------------------------


class WorkerHello(Struct, frozen=True, array_like=True, tag="worker"):
    """A worker introduces itself with the secret that it was started with.

    Nothing moves any more on account of a former worker of the same pool: a worker process has
    locked the pool, one in the rank's own process has fenced all links of its former lives.

    ``lands_after_settled`` is what its backend declares: bytes of a settled move may still land.
    """

    version: int
    token: Annotated[bytes, Meta(min_length=16, max_length=64)]
    pid: Count
    lands_after_settled: bool = True


class WorkerBye(Struct, frozen=True, array_like=True, tag="worker_bye"):
    """A worker in a rank's own process does not run: it could not start, or has ended.

    Nothing moves on its account any more. ``why`` says what happened.
    """

    token: Annotated[bytes, Meta(min_length=16, max_length=64)]
    why: Text


class Connected(Struct, frozen=True, array_like=True, tag="connected"):
    """The link to ``peer`` is up; ``seconds`` is how long that took."""

    peer: Text
    seconds: float


class ConnectFailed(Struct, frozen=True, array_like=True, tag="connect_failed"):
    """The link to ``peer`` cannot be opened. Its moves fail one by one."""

    peer: Text
    message: Text


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    """These moves have got on, or wait behind one that has."""

    moves: list[U64]


class MoveDone(Struct, frozen=True, array_like=True, tag="done"):
    """All bytes of the move are in place."""

    move: U64
    size_bytes: Count
    seconds: float


class MoveFailed(Struct, frozen=True, array_like=True, tag="failed"):
    """The move has failed.

    ``kind`` is ``connect``, ``disconnected``, ``transport`` or ``revoked``. ``settled``: the source
    is quiet; else ``MoveSettled`` follows. ``started``: something of it was posted.
    """

    move: U64
    kind: Annotated[str, Meta(max_length=32)]
    message: Text
    settled: bool
    started: bool


class MoveSettled(Struct, frozen=True, array_like=True, tag="settled"):
    """The source of a failed move is quiet now."""

    move: U64


class Fenced(Struct, frozen=True, array_like=True, tag="fenced"):
    """Nothing is sent to ``peer`` any more; its link is gone. ``error`` is empty when that is so."""

    peer: Text
    error: Text = ""


Report = Connected | ConnectFailed | Progress | MoveDone | MoveFailed | MoveSettled | Fenced


class Reports(Struct, frozen=True, array_like=True, tag="reports"):
    """A worker's reports, in order; an empty one is its sign of life."""

    items: Annotated[list[Report], Meta(max_length=MAX_ITEMS)]


# --- coordinator -> worker -------------------------------------------------------------------


class ConnectPeer(Struct, frozen=True, array_like=True, tag="connect"):
    """Open a link to a decode rank; ``pages``, ``regions`` and ``layout`` describe its pool."""

    peer: str
    endpoint: bytes
    layout: Layout
    world_size: int
    rank: int
    pages: int
    regions: int = 1


class Move(Struct, frozen=True, array_like=True, tag="move"):
    """Write our pages onto the peer's, pairwise; both lists have the same length."""

    move: int
    peer: str
    source_pages: bytes
    destination_pages: bytes


class Revoke(Struct, frozen=True, array_like=True, tag="revoke"):
    """Drop what of these moves is not posted yet; report each as failed (``revoked``)."""

    moves: list[int]


class FencePeer(Struct, frozen=True, array_like=True, tag="fence"):
    """Destroy the link to ``peer`` and forget it; answer ``Fenced``."""

    peer: str


Command = ConnectPeer | Move | Revoke | FencePeer


class Commands(Struct, frozen=True, array_like=True, tag="commands"):
    """Commands to a worker, in order."""

    items: list[Command]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """A worker ends in good order."""
