"""The contract of a transfer backend, whole.

A backend moves bytes and reports. Rooms, deadlines, retries and policy are not its business.

Theory of operation
    One ``Backend`` object per process holds the memory that this process registered. The receiving
    side only starts, registers and hands out its ``endpoint()``. The sending side also calls
    ``connect(peer, endpoint)``, once per peer, and gets a ``Link``; ``link.write(parts)`` posts
    one ``Transfer``, and ``transfer.poll()`` is called until the transfer is terminal *and*
    settled. Data flows by WRITE only, from our memory into the peer's.

Threads
    ``Backend`` methods are called from one thread at a time, except ``connect``, which may run in any.
    A ``Link`` and its transfers belong to the thread that called ``connect``. Any call may
    block; a call that blocks must hold up no other link.

Done, failed, settled
    ``DONE`` means: every byte is in place at the destination; nothing moves any more.
    ``FAILED`` alone says nothing about memory. ``settled`` says that the *source* is not read any
    more by this transfer. Bytes already handed to the network may still land at the destination
    for a while when ``Capabilities.lands_after_settled`` is true.
    Giving up on a transfer stops nothing: poll it until it is settled, or fence its link.

Errors
    Only ``BackendError`` and its subclasses leave a backend; a native library's exceptions are
    mapped. A failing transfer does not raise from ``poll``: it becomes ``FAILED`` with ``error`` set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    BlockIndex = NDArray[np.int32]


class BackendError(Exception):
    """The base of every error that leaves a backend: what happened, and what to do."""


class BackendUnavailableError(BackendError):
    """There is no such backend, or a library that it needs is missing; the text says which."""


class InvalidTransferError(BackendError):
    """The caller named memory that is not registered, or block lists that do not match."""


class ConnectError(BackendError):
    """A peer cannot be reached, or its endpoint cannot be used."""


class PeerDisconnectedError(BackendError):
    """The peer went away before or during a transfer. The link is dead: connect anew."""


class TransferError(BackendError):
    """The engine reported that a transfer failed."""


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous piece of memory to register.

    Attributes:
        address: first byte, as mapped in this process.
        size_bytes: length; positive.
        memory: ``"host"`` or ``"cuda"``.
        device: device number for ``"cuda"``.
        path: the file in ``/dev/shm`` behind it, when there is one (``loopback`` needs it).
        gate_path: another file there, of ``gate_bytes``, for a gate that writers on this host have to
            pass (``backends.gate``); for memory that has no file of its own.

    """

    address: int
    size_bytes: int
    memory: str = "host"
    device: int = 0
    path: str | None = None
    gate_path: str | None = None
    gate_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal blocks at a fixed stride inside one registered region.

    Block ``i`` covers ``[offset_bytes + i * stride_bytes, + block_bytes)`` of the region.
    A grid is hashable: a backend may prepare it once per peer and use it again.

    Attributes:
        region: the number that ``register`` returned (on the peer's side: in its order).
        offset_bytes: where block 0 starts.
        block_bytes: length of a block; positive, at most ``stride_bytes``.
        stride_bytes: distance between the starts of two blocks.
        count: number of blocks.

    """

    region: int
    offset_bytes: int
    block_bytes: int
    stride_bytes: int
    count: int

    @property
    def end_bytes(self) -> int:
        """One past the last byte of the last block."""
        return self.offset_bytes + (self.count - 1) * self.stride_bytes + self.block_bytes


# A large move has thousands of parts, and a Struct is five times cheaper to make than a frozen dataclass.
class Part(Struct, frozen=True, eq=False):
    """Copy blocks of ``source`` onto blocks of ``destination``, run by run.

    A run is blocks that follow one another on both sides. All arrays are int32, of one dimension and
    equal length; both grids have the same ``block_bytes``. ``backends.descriptors`` checks parts, and
    makes their runs, or all of their blocks, out of them.

    Attributes:
        source: the grid in our memory.
        source_blocks: the first block of each run there.
        destination: the grid in the peer's memory.
        destination_blocks: the first block of each run there.
        lengths: blocks in each run; None: each is one block.

    """

    source: Grid
    source_blocks: BlockIndex
    destination: Grid
    destination_blocks: BlockIndex
    lengths: BlockIndex | None = None

    @property
    def count(self) -> int:
        """Blocks in all runs."""
        return int(self.source_blocks.size if self.lengths is None else self.lengths.sum())

    @property
    def size_bytes(self) -> int:
        """Bytes that this part moves."""
        return self.count * self.source.block_bytes


class Status(Enum):
    """Where a transfer stands."""

    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class Transfer(ABC):
    """One posted write. Poll it until it is terminal and settled; never drop it before.

    Attributes:
        status: where it stands, as of the last poll.
        settled: whether the source is quiet.
        error: why it failed.
        progress: grows whenever a part of it has arrived. Whoever polls asks more often while it
            grows, and does not take the transfer for one that stands still. An engine that cannot tell
            leaves it at 0.

    """

    __slots__ = ("error", "progress", "settled", "status")

    def __init__(self) -> None:
        """A transfer starts moving, unsettled."""
        self.status = Status.MOVING
        self.settled = False
        self.error: BackendError | None = None
        self.progress = 0

    @property
    def rest_s(self) -> float:
        """How long the next poll may wait, in seconds: an earlier one would cost more than it tells."""
        return 0.0

    @abstractmethod
    def poll(self) -> Status:
        """Ask the engine once; update and return ``status``. Cheap and harmless after the end."""


class Link(ABC):
    """A sending connection to one peer."""

    peer: str

    @abstractmethod
    def write(self, parts: Sequence[Part]) -> Transfer:
        """Post one write of all ``parts`` (at least one block in all).

        The transfer may be terminal at once. A failure after something may have been posted is no
        exception but a ``FAILED`` transfer.

        Raises:
            InvalidTransferError: a block lies outside its grid, a grid outside its region, the
                arrays differ in length or the block sizes differ. Nothing was posted.
            PeerDisconnectedError: the peer is known to be gone. Nothing was posted.
            TransferError: the engine refused the post, or ``max_outstanding_per_peer`` transfers
                are not settled yet. Nothing was posted.

        """

    @abstractmethod
    def fence(self) -> None:
        """Destroy what this link sends with; on return nothing is read from our memory for it.

        Every transfer of the link that was not ``DONE`` becomes ``FAILED`` and ``settled``.
        The link cannot be used afterwards. Other links are not touched. Calling it twice is fine.

        Raises:
            BackendError: the engine could not be destroyed; nothing may be assumed quiet.

        """


def fence_all(links: Sequence[Link]) -> None:
    """Fence every link, also when one cannot be.

    Raises:
        BackendError: naming all that could not be fenced.

    """
    problems = []
    for link in links:
        try:
            link.fence()
        except BackendError as error:
            problems.append(str(error))
    if problems:
        raise BackendError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares about itself.

    Attributes:
        cancellable: a moving transfer can be stopped without destroying its link.
        max_outstanding_per_peer: how many transfers may be moving on one link.
        min_efficient_bytes: runs shorter than this are slow; a planner may prefer larger pages.
        lands_after_settled: bytes may still land at the destination after the source settled.

    """

    cancellable: bool
    max_outstanding_per_peer: int
    min_efficient_bytes: int
    lands_after_settled: bool


class Backend(ABC):
    """The engine of one process. Constructing it is free; ``start`` allocates."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, agent: str, options: Mapping[str, object]) -> None:
        """Remember the settings.

        Args:
            agent: a name that no other agent in the deployment has.
            options: the backend's own settings; each backend documents and checks its keys.

        Raises:
            BackendError: an option is unknown or has an impossible value.

        """
        self.agent = agent
        self.options = dict(options)

    @abstractmethod
    def start(self, *, sends: bool) -> None:
        """Bring the engine up. ``sends`` is false on a side that is only written into."""

    @abstractmethod
    def register(self, region: Region) -> int:
        """Make memory usable, as source and as destination; returns its number (0, 1, ...).

        Links that are open, and endpoints handed out before, need not know of it.

        Raises:
            InvalidTransferError: an empty region, one that overlaps another, or unknown memory.
            BackendError: the engine refused it.

        """

    @abstractmethod
    def endpoint(self) -> bytes:
        """What a peer needs to write into our registered regions. Call it after ``register``."""

    @abstractmethod
    def connect(self, peer: str, endpoint: bytes) -> Link:
        """Open a link to the owner of ``endpoint``; the calling thread owns it.

        Raises:
            ConnectError: the endpoint is malformed, of another backend or cannot be reached.

        """

    @abstractmethod
    def close(self) -> None:
        """Fence all links, give the memory back. The object cannot be used afterwards."""

    def silent(self) -> bool:
        """Whether it is proven that no byte lands any more in what this side had registered.

        Asked after ``close``, again and again until it is so. A backend that cannot prove it says
        false for ever: then the memory must not be used again for anything else.
        """
        return False
