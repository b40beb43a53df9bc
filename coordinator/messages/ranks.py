"""Between ranks and the coordinator."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from coordinator.layout import Layout
from coordinator.messages.bounds import (
    MAX_HELD,
    MAX_ITEMS,
    MAX_NAME,
    MAX_REGIONS,
    MAX_REMEMBERED,
    MAX_WORLD,
    U64,
    Aux,
    Count,
    Name,
    RankNumber,
    Room,
    Text,
)
from coordinator.messages.events import Event, Role

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
    """Prefill's own engine reads this rank's pages of a failed attempt no more.

    The attempt is named, for rooms are used again: more than one of them may be unquiet at a time.
    """

    room: Room
    after: Count
    attempt: Count


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
