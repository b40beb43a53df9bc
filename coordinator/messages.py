"""Every message on the wire, and the bounds of each. The protocol exists once, here.

Sockets
    control   ranks and workers (DEALER) <-> coordinator (ROUTER); one payload frame per message
    outcomes  coordinator (XPUB) -> ranks (SUB); two frames: topic (the group), ``Broadcast``

Reliability
    From a rank to the coordinator: each ``Submit`` numbers its items; the coordinator applies them
    in order, drops what it has, and tells on every ``Broadcast`` up to where it has each rank's.
    From the coordinator to a group: events are numbered 1, 2, 3 ... within the epoch; a rank
    acknowledges the highest number up to which it has everything.

Which attempt does a rank mean?
    Rooms are used again. Every item carries ``after``: the number of the last event that the engine
    had *drained* when it made the call. An item made before the engine drained the outcome of the
    room's last attempt belongs to that attempt, and is late; otherwise it opens a new attempt.

Pages travel as packed little-endian int32 (``bytes``, 4 per page). Durations are seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from coordinator.errors import ProtocolError
from coordinator.layout import Layout
from coordinator.reasons import Failure

VERSION: Final = 1
PAGE_BYTES: Final = 4
#: Largest aux blob that a handoff carries (first token, sampling state, hidden states).
MAX_AUX_BYTES: Final = 1 << 20
MAX_NAME: Final = 128
MAX_WORLD: Final = 1024
#: Pieces of memory that a pool may consist of.
MAX_REGIONS: Final = 4096
MAX_ITEMS: Final = 1024
#: How many of its last events a rank remembers for a coordinator that has to start anew.
MAX_REMEMBERED: Final = 1024
MAX_HELD: Final = 1 << 18
#: How much of what is wrong with a frame is told; the answer and the log line stay small.
MAX_QUOTED: Final = 256
#: Default bound of a whole frame: the pages of 512K one-token pages, twice over.
MAX_FRAME_BYTES: Final = 8 << 20
#: The backend of prefill ranks that move the bytes by themselves and only tell what becomes of it.
EXTERNAL: Final = "external"

#: msgpack itself ends at 2**64 - 1; msgspec takes no larger bound than an int64.
U64 = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_WORLD)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[A-Za-z0-9._:-]+\Z")]
Text = Annotated[str, Meta(max_length=4096)]
#: 0 is the null id: engines use it for "no room".
Room = Annotated[int, Meta(ge=1)]
Aux = Annotated[bytes, Meta(max_length=MAX_AUX_BYTES)]


class Role(StrEnum):
    """Which side of a handoff a group is on."""

    PREFILL = "prefill"
    DECODE = "decode"


# --- events of a group -------------------------------------------------------------------------


class Elsewhere(Struct, frozen=True, array_like=True):
    """Where the other side's group has the same verdict: as event ``number`` of ``lineage``."""

    lineage: U64
    number: Count


class Outcome(Struct, frozen=True, array_like=True, tag="outcome", eq=False):
    """The one verdict of a handoff.

    Attributes:
        failure: None when it succeeded.
        aux: to decode, with a success: the side data that prefill's rank 0 has sent along.
        elsewhere: None while the other side is not known. It is no part of what the verdict says:
            two are equal without it.

    """

    room: Room
    attempt: Count
    failure: Failure | None = None
    aux: Aux = b""
    elsewhere: Elsewhere | None = None

    def __eq__(self, other: object) -> bool:
        """Whether both say the same."""
        return isinstance(other, Outcome) and self._says() == other._says()

    def __hash__(self) -> int:
        """Equal ones have the same."""
        return hash(self._says())

    def _says(self) -> tuple[int, int, Failure | None, bytes]:
        return self.room, self.attempt, self.failure, self.aux

    @property
    def succeeded(self) -> bool:
        """Whether KV and side data are in place on every decode rank."""
        return self.failure is None


class Released(Struct, frozen=True, array_like=True, tag="released"):
    """This side's pages of the handoff are quiet: they may be used again."""

    room: Room
    attempt: Count


Event = Outcome | Released


# --- rank -> coordinator ---------------------------------------------------------------------


class Process(Struct, frozen=True, array_like=True):
    """Which process a rank is; its pid means something only where both other fields match ours."""

    pid: Count
    boot_id: Text
    pid_namespace: Count


class Pool(Struct, frozen=True, array_like=True):
    """A rank's KV pool. ``path`` is empty when the memory cannot be mapped by others.

    ``regions`` is of how many pieces of memory it consists; each has the same number of planes.
    """

    path: Annotated[str, Meta(max_length=255)]
    size_bytes: Count
    pages: Annotated[int, Meta(ge=1, lt=2**31)]
    regions: Annotated[int, Meta(ge=1, le=MAX_REGIONS)] = 1


class Held(Struct, frozen=True, array_like=True):
    """A room that is in flight as far as a rank knows.

    ``after`` is the number of the last event that its engine had drained when it spoke of the room;
    ``attempt`` the last attempt of the room of which it has heard the verdict, or 0.
    """

    room: Room
    after: Count
    attempt: Count


class Unreleased(Struct, frozen=True, array_like=True):
    """An attempt of which a rank has heard the verdict, but not the release.

    ``quiet``: the rank has told that its engine, which moves the pages by itself, reads them no more.
    """

    room: Room
    attempt: Count
    quiet: bool = False


class SideData(Struct, frozen=True, array_like=True):
    """What a prefill rank has sent along with an attempt that has succeeded as far as it knows.

    The attempt is 0 when it has heard no verdict of it: perhaps another rank of its group has, as an
    event with a number above ``after``.
    """

    room: Room
    attempt: Count
    aux: Aux
    after: Count = 0


class Memory(Struct, frozen=True, array_like=True):
    """What a rank knows and a coordinator that starts anew has to learn from it.

    Attributes:
        events: the last events that the rank has; the last one has the number ``Hello.acknowledged``.
        held: the rooms that are in flight as far as the rank knows.
        unreleased: what has a verdict, and pages that were not released.
        sent: prefill's side data of the last successes, which decode may not have got, and of rooms
            in flight.
        said: the rooms of which the rank has spoken, and surely nobody has heard it.
        lineage: that of its group; see ``Welcome``.

    """

    events: Annotated[list[Event], Meta(max_length=MAX_REMEMBERED)]
    held: Annotated[list[Held], Meta(max_length=MAX_HELD)]
    unreleased: Annotated[list[Unreleased], Meta(max_length=MAX_HELD)]
    sent: Annotated[list[SideData], Meta(max_length=MAX_REMEMBERED)] = []
    said: Annotated[list[Held], Meta(max_length=MAX_HELD)] = []
    lineage: U64 = 0


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """A rank introduces itself, at first and again after every reconnect.

    ``instance`` is drawn at random once per client object. ``epoch`` and ``acknowledged`` are what
    the rank already has (0, 0 at first). ``confirmed`` is up to where its items need not be sent
    again. ``endpoint`` is a decode rank's receiving endpoint. ``transport`` is how it reached us
    (``ipc``, ``tcp``): it is told an outcomes address of the same kind. ``memory`` goes to a
    coordinator of another epoch, which asks for it with ``WhoAreYou``. ``life`` counts how often the
    engine has given up on its coordinator, the same on all ranks; what a former life said is void.
    """

    version: int
    role: Role
    group: Name
    rank: RankNumber
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD)]
    instance: U64
    process: Process
    backend: Annotated[str, Meta(max_length=MAX_NAME)]
    layout: Layout
    pool: Pool
    endpoint: Annotated[bytes, Meta(max_length=1 << 20)]
    epoch: U64 = 0
    acknowledged: Count = 0
    confirmed: Count = 0
    transport: Annotated[str, Meta(max_length=16)] = "ipc"
    memory: Memory | None = None
    life: Count = 0


class Open(Struct, frozen=True, array_like=True, tag="open"):
    """Prefill has queued this room."""

    room: Room
    after: Count


class Send(Struct, frozen=True, array_like=True, tag="send"):
    """Prefill's next pages of this room, in order; ``last`` says that prefill is complete here."""

    room: Room
    after: Count
    pages: bytes
    last: bool
    aux: Aux = b""


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """Decode's pages of this room, from behind the ``prefix_pages`` pages that it has already."""

    room: Room
    after: Count
    pages: bytes
    prefix_pages: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Extend(Struct, frozen=True, array_like=True, tag="extend"):
    """Decode still has this room in its queue: move the deadline."""

    room: Room
    after: Count


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """This rank's engine gives the room up, or has an error of its own with it; ``why`` is carried."""

    room: Room
    after: Count
    why: Text = ""


class LegDone(Struct, frozen=True, array_like=True, tag="leg_done"):
    """Prefill's own engine has moved all of this rank's pages of the room, and reads them no more.

    This and the next two are for ranks of the backend ``EXTERNAL`` alone.
    """

    room: Room
    after: Count


class LegFailed(Struct, frozen=True, array_like=True, tag="leg_failed"):
    """Prefill's own engine has failed to move them; ``quiet``: it reads them no more."""

    room: Room
    after: Count
    message: Text
    quiet: bool


class LegQuiet(Struct, frozen=True, array_like=True, tag="leg_quiet"):
    """Prefill's own engine reads this rank's pages of the failed handoff no more."""

    room: Room
    after: Count


Item = Open | Send | Offer | Extend | Cancel | LegDone | LegFailed | LegQuiet


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """A rank's items, and what it has heard. Sent at least once per heartbeat.

    Attributes:
        epoch: the epoch that the numbers belong to.
        first: number of ``items[0]``; items are numbered 1, 2, 3 ... over the life of a client.
        acknowledged: it has every event up to this one.
        applied: its engine had drained every event up to this one before it said what comes after these
            items. They themselves may be older.
        listening: it has seen a broadcast of this epoch.

    """

    epoch: U64
    first: Count
    acknowledged: Count
    applied: Count
    listening: bool
    items: Annotated[list[Item], Meta(max_length=MAX_ITEMS)]


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The rank leaves in good order."""

    why: Text = ""


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


# --- coordinator -> rank ---------------------------------------------------------------------


class WorkerOrders(Struct, frozen=True, array_like=True):
    """What a prefill rank must know to run its worker itself.

    Attributes:
        token: the secret with which that worker introduces itself, at the rank's own control address.
        label: names the worker in logs and to its engine.
        backend: name of the backend.
        options: the backend's own settings.
        heartbeat_s: an empty report is sent at least this often.

    """

    token: bytes
    label: str
    backend: str
    options: dict[str, Any]
    heartbeat_s: float


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to ``Hello``.

    Attributes:
        epoch: this coordinator's incarnation.
        outcomes: the address to subscribe to.
        first: number of ``events[0]``; the rank has, or will never need, what came before.
        events: every event that this rank has not acknowledged.
        stable: up to where every live rank of the group has the events.
        received: up to which number the coordinator has this rank's items.
        heartbeat_s: how often each side gives a sign of life at least.
        lineage: drawn at random when the group began. It stays when a coordinator takes the group over
            from another one, and is another one when a group begins anew under the same name.
        worker: for a prefill rank that is to run its worker itself. The same orders mean the same
            worker; others, that the former one must end.

    """

    epoch: int
    outcomes: str
    first: int
    events: list[Event]
    stable: int
    received: int
    heartbeat_s: float
    lineage: int = 0
    worker: WorkerOrders | None = None


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """A registration, a frame or an item was not accepted.

    ``fatal`` says that the rank must not try again by itself. ``room`` is 0 when it is about none.
    ``life`` is that of the group when the rank's was over before; see ``Hello``.
    """

    code: str
    message: str
    room: int = 0
    fatal: bool = False
    life: int = 0


class WhoAreYou(Struct, frozen=True, array_like=True, tag="who"):
    """The coordinator does not know the sender (it was restarted, or the rank was lost): say Hello.

    A rank that comes from another epoch says it with its ``memory``.
    """

    epoch: int


class Resend(Struct, frozen=True, array_like=True, tag="resend"):
    """Items after this number did not arrive in order: submit them again."""

    received: int


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """A worker ends in good order."""


class Broadcast(Struct, frozen=True, array_like=True, tag="broadcast"):
    """Events of one group, in order; with none it is a heartbeat (``first`` is then head + 1).

    Attributes:
        received: for each rank of the group, up to which number its items have arrived.
        missing: the ranks of the group that are not there, or have not seen a broadcast yet; with
            none the group is ready.

    """

    epoch: int
    first: int
    stable: int
    received: list[int]
    missing: list[int]
    events: list[Event]

    @property
    def ready(self) -> bool:
        """Whether all ranks of the group have seen a broadcast."""
        return not self.missing


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
