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

``bounds`` has the sizes, ``events`` what groups are told, ``ranks`` and ``workers`` what these say and
hear, ``codec`` the bytes. All of it is imported from here.
"""

from __future__ import annotations

from coordinator.messages.bounds import (
    EXTERNAL,
    MAX_AUX_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELD,
    MAX_ITEMS,
    MAX_NAME,
    MAX_REGIONS,
    MAX_REMEMBERED,
    MAX_WORLD,
    PAGE_BYTES,
    U64,
    VERSION,
    Aux,
    Count,
    Name,
    RankNumber,
    Room,
    Text,
)
from coordinator.messages.codec import (
    MAX_QUOTED,
    FromPeer,
    ToRank,
    ToWorker,
    decode_broadcast,
    decode_from_peer,
    decode_to_rank,
    decode_to_worker,
    encode,
)
from coordinator.messages.events import Elsewhere, Event, Outcome, Released, Role
from coordinator.messages.ranks import (
    Broadcast,
    Bye,
    Cancel,
    Extend,
    Held,
    Hello,
    Item,
    LegDone,
    LegFailed,
    LegQuiet,
    Memory,
    Offer,
    Open,
    Pool,
    Process,
    Refused,
    Resend,
    Send,
    SideData,
    Submit,
    Unreleased,
    Welcome,
    WhoAreYou,
    WorkerOrders,
)
from coordinator.messages.workers import (
    Command,
    Commands,
    Connected,
    ConnectFailed,
    ConnectPeer,
    Fenced,
    FencePeer,
    Move,
    MoveDone,
    MoveFailed,
    MoveSettled,
    Progress,
    Report,
    Reports,
    Revoke,
    Stop,
    WorkerBye,
    WorkerHello,
)

__all__ = [
    "EXTERNAL",
    "MAX_AUX_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_HELD",
    "MAX_ITEMS",
    "MAX_NAME",
    "MAX_QUOTED",
    "MAX_REGIONS",
    "MAX_REMEMBERED",
    "MAX_WORLD",
    "PAGE_BYTES",
    "U64",
    "VERSION",
    "Aux",
    "Broadcast",
    "Bye",
    "Cancel",
    "Command",
    "Commands",
    "ConnectFailed",
    "ConnectPeer",
    "Connected",
    "Count",
    "Elsewhere",
    "Event",
    "Extend",
    "FencePeer",
    "Fenced",
    "FromPeer",
    "Held",
    "Hello",
    "Item",
    "LegDone",
    "LegFailed",
    "LegQuiet",
    "Memory",
    "Move",
    "MoveDone",
    "MoveFailed",
    "MoveSettled",
    "Name",
    "Offer",
    "Open",
    "Outcome",
    "Pool",
    "Process",
    "Progress",
    "RankNumber",
    "Refused",
    "Released",
    "Report",
    "Reports",
    "Resend",
    "Revoke",
    "Role",
    "Room",
    "Send",
    "SideData",
    "Stop",
    "Submit",
    "Text",
    "ToRank",
    "ToWorker",
    "Unreleased",
    "Welcome",
    "WhoAreYou",
    "WorkerBye",
    "WorkerHello",
    "WorkerOrders",
    "decode_broadcast",
    "decode_from_peer",
    "decode_to_rank",
    "decode_to_worker",
    "encode",
]
