"""What an engine sees: one client object per rank and coordinator."""

from __future__ import annotations

import operator
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final, Self, SupportsIndex

from coordinator.client.hosting import Hosting
from coordinator.client.introduction import introduction
from coordinator.client.iothread import IoThread
from coordinator.client.lives import Lives
from coordinator.client.pages import pack
from coordinator.client.proof import DestinationProof, SourceProof
from coordinator.client.settings import DEFAULTS
from coordinator.client.sockets import load_keys
from coordinator.client.standing import RankState
from coordinator.errors import NotReadyError, PoolError, ProtocolError
from coordinator.messages import (
    MAX_AUX_BYTES,
    MAX_FRAME_BYTES,
    Cancel,
    Extend,
    Offer,
    Open,
    Role,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.client.conversation import Conversation
    from coordinator.client.endpoint import Endpoint
    from coordinator.client.inbox import Inbox
    from coordinator.client.pages import Pages
    from coordinator.client.pool import KVPool
    from coordinator.client.proof import Proof
    from coordinator.client.settings import ClientSettings
    from coordinator.messages import Event, Hello, Item, Refused

_MAX_ROOM: Final = 2**64 - 1
_MAX_PREFIX_PAGES: Final = 2**31
_MAX_WHY: Final = 4096
#: What an item takes beside its pages and its aux; more than enough.
ITEM_BYTES: Final = 64
_MAX_ITEM_BYTES: Final = MAX_FRAME_BYTES - 4096
_NOTHING: Final[tuple[Event, ...]] = ()


class Rank:
    """What ``PrefillRank`` and ``DecodeRank`` have in common. It is a context manager.

    A room's number may be used again when both engines have heard its outcome. What an engine says of
    a room that has failed before the engine ever spoke of it is answered with that failure.

    Calls may come from any thread and return at once, except where they are said to wait. Once the
    coordinator has refused this rank, or the client was closed or broke, every call raises the
    cause (``RefusedError``, ``ClosedError``).

    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        settings: ClientSettings,
        make_proof: Callable[[Callable[[bytes], None]], Proof],
        hosting: Hosting | None = None,
    ) -> None:
        """Begin to talk to the coordinator; use ``connect``."""
        self._settings = settings
        self._pool_pages = hello.pool.pages
        self._lives = Lives(hello, address, settings, time.monotonic())
        self._io = IoThread(self._lives, address, hello.group, settings, make_proof, hosting)
        self._close = weakref.finalize(self, self._io.close)

    # --- what came ---------------------------------------------------------------------------

    def drain(self, through: bytes | None = None) -> Sequence[Event]:
        """Return the events that are new: outcomes and releases, in order, each exactly once.

        Args:
            through: a head token, rank 0's as a rule: exactly the events up to it, so that all
                ranks of a group apply the same in the same step. None: all that has arrived.

        Costs no system call, and less than half a microsecond, when nothing came. Waits only for
        a token that is ahead of this rank, as it can be while it joins a group that is running.

        A coordinator that is away for ``coordinator_lost_s`` is lost: rank 0's token says so, and
        with it every rank's ``drain`` returns an outcome ``coordinator_lost`` for each room in flight.
        Without tokens each rank judges for itself, when it drains. The rooms' releases follow when
        nothing moves at their pages any more. What is said afterwards is for the next coordinator.

        Raises:
            NotReadyError: this rank is still behind the token after ``lockstep_wait_s``, or cannot
                prove that pages of a lost coordinator are quiet, as rank 0 has proven of its own.
            ProtocolError: ``through`` is no head token.

        """
        conversation = self._lives.conversation
        if not conversation.news and through == conversation.drained_through:
            return _NOTHING
        return self._io.drain(through, self._settings.lockstep_wait_s)

    @property
    def head(self) -> bytes:
        """The token of the last event that every live rank of the group has; 17 bytes.

        Rank 0's also tells that the coordinator is lost, and that what it left behind is quiet: read
        it once for each step, and have every rank drain through it, rank 0 too.
        """
        return self._io.head() if self._lives.flagged else self._lives.inbox.token

    @property
    def state(self) -> RankState:
        """Where this client stands with its coordinator."""
        return self._lives.conversation.standing.state

    @property
    def unreleased(self) -> int:
        """How many handoffs with lost coordinators have pages that are not released to the engine."""
        return self._lives.unreleased

    def refusals(self) -> list[Refused]:
        """Return what the coordinator did not accept of this rank's calls since the last time.

        Other ranks do not hear of these. The newest 1,024 are kept; all are logged.
        """
        return self._io.take_refusals()

    def wait(self, timeout_s: float) -> bool:
        """Block until ``drain`` may return something new; False when nothing came in time."""
        return self._io.wait_for(lambda: self._lives.conversation.news, timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``drain`` may return something new.

        Raises:
            NotReadyError: there is none to be had.

        """
        return self._io.fileno()

    def wait_ready(self, timeout_s: float) -> None:
        """Block until all ranks of the group hear the coordinator.

        Raises:
            NotReadyError: they do not in time; the text names what is missing.

        """
        standing = self._lives.conversation.standing
        self._io.wait_for(lambda: standing.state is RankState.READY or standing.fault is not None, timeout_s)
        standing.check()
        if standing.state is not RankState.READY:
            message = f"{standing.name} is not ready after {timeout_s} s: {standing.explain()}"
            raise NotReadyError(message)

    def close(self) -> None:
        """Leave: send what can be sent at once, say goodbye. Takes at most 4 s; twice is fine."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is said ------------------------------------------------------------------------

    def cancel(self, room: SupportsIndex, why: str = "") -> None:
        """Give the room up: its handoff fails on all ranks of both sides, with ``why``.

        Args:
            room: the request's id.
            why: a sentence for people; beyond 4,096 characters it is cut.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        item = Cancel(room_number(room), inbox.drained, why[:_MAX_WHY])
        self._io.say(item, ITEM_BYTES + 4 * len(why), inbox)

    @property
    def _conversation(self) -> Conversation:
        return self._lives.conversation

    def _say_pages(self, item: Item, size_bytes: int, inbox: Inbox) -> None:
        if size_bytes > _MAX_ITEM_BYTES:
            message = (
                f"{size_bytes} bytes of pages and aux in one call, at most {_MAX_ITEM_BYTES} are accepted"
            )
            raise PoolError(message)
        self._io.say(item, size_bytes + ITEM_BYTES, inbox)


class PrefillRank(Rank):
    """A rank of a prefill engine: it announces rooms and sends their pages."""

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        group: str,
        rank: int,
        world_size: int,
        pool: KVPool,
        settings: ClientSettings = DEFAULTS,
    ) -> Self:
        """Join ``group`` at the coordinator; returns at once, see ``wait_ready``.

        Args:
            address: the coordinator's control address, ``ipc://...`` or ``tcp://host:port``.
            group: the engine's name, the same on all its ranks.
            rank: this rank's number, from 0.
            world_size: how many ranks the engine has.
            pool: the pages that are sent; it must outlive this object.
            settings: bounds.

        Where the coordinator's ``backend.hosting`` is ``"rank"``, the worker that moves the pages runs
        in threads of this process; see ``coordinator.client.hosting``.

        Raises:
            ConfigError: the address cannot be used.
            PoolError: the pool does not fit, or is closed.
            ProtocolError: a name or a number is not acceptable.
            NotReadyError: this process has no descriptors or threads left for it.

        """
        hello = introduction(Role.PREFILL, address, group, rank, world_size, pool)
        hosting = Hosting(pool, hello, address, load_keys(settings))
        return cls(address, hello, settings, lambda _: SourceProof(pool, hosting), hosting)

    def open(self, room: SupportsIndex) -> None:
        """Announce that this engine has queued the room, so that its offer does not expire.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        self._io.say(Open(room_number(room), inbox.drained), ITEM_BYTES, inbox)

    def send(self, room: SupportsIndex, pages: Pages, *, last: bool = False, aux: bytes = b"") -> None:
        """Hand over the room's next pages. They must not change until the room is released.

        Args:
            room: the request's id.
            pages: page numbers, in the order of the offered ones; may be empty.
            last: prefill is complete on this rank.
            aux: side data that rank 0's last call brings to all decode ranks; at most 1 MiB.

        Raises:
            PoolError: the pages are no list of pages of the pool.
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be, or ``aux`` is too large or no bytes.

        """
        inbox = self._lives.inbox
        after = inbox.drained
        packed = pack(pages, self._pool_pages)
        side = _aux(aux) if aux else b""
        item = Send(room_number(room), after, packed, bool(last), side)
        self._say_pages(item, len(packed) + len(side), inbox)


class DecodeRank(Rank):
    """A rank of a decode engine, towards one prefill node: it offers pages to write into."""

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        group: str,
        rank: int,
        world_size: int,
        endpoint: Endpoint,
        settings: ClientSettings = DEFAULTS,
    ) -> Self:
        """Join ``group`` at the coordinator of one prefill node; returns at once, see ``wait_ready``.

        Args:
            address: the coordinator's control address, ``ipc://...`` or ``tcp://host:port``.
            group: the engine's name, the same on all its ranks.
            rank: this rank's number, from 0.
            world_size: how many ranks the engine has.
            endpoint: the registered pages; it must outlive this object.
            settings: bounds.

        Raises:
            ConfigError: the address cannot be used.
            PoolError: the pool does not fit, or is closed.
            ProtocolError: a name or a number is not acceptable.
            NotReadyError: this process has no descriptors or threads left for it.

        """
        hello = introduction(Role.DECODE, address, group, rank, world_size, endpoint.pool, endpoint)
        return cls(address, hello, settings, partial(DestinationProof, endpoint))

    def offer(self, room: SupportsIndex, pages: Pages, prefix_pages: int = 0) -> None:
        """Tell that these pages are ready for the room. They must not be read before its outcome.

        Args:
            room: the request's id.
            pages: page numbers, in the order of the prompt, from behind the prefix on.
            prefix_pages: how many pages of the prompt, from the first, decode has already; what
                prefill sends for these is not transferred. Empty ``pages`` with all of the prompt
                in the prefix succeed without any transfer.

        Raises:
            PoolError: the pages are no list of pages of the pool, or name one twice.
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        after = inbox.drained
        packed = pack(pages, self._pool_pages, distinct=True)
        if not 0 <= prefix_pages < _MAX_PREFIX_PAGES:
            message = f"prefix_pages is {prefix_pages}, must be from 0 to 2**31 - 1"
            raise PoolError(message)
        item = Offer(room_number(room), after, packed, operator.index(prefix_pages))
        self._say_pages(item, len(packed), inbox)

    def extend(self, room: SupportsIndex) -> None:
        """Tell that the room is still queued here: its deadline moves, up to the hard cap.

        Raises:
            QueueFullError: too many calls wait for a coordinator that is away.
            ProtocolError: no such room can be.

        """
        inbox = self._lives.inbox
        self._io.say(Extend(room_number(room), inbox.drained), ITEM_BYTES, inbox)


def room_number(room: SupportsIndex) -> int:
    """Return the room as a plain integer.

    Raises:
        ProtocolError: no such room can be.

    """
    try:
        number = operator.index(room)
    except TypeError as error:
        message = f"room is {room!r}, must be an integer"
        raise ProtocolError(message) from error
    if not 0 < number <= _MAX_ROOM:
        message = f"room is {number}, must be from 1 to 2**64 - 1; 0 means no room"
        raise ProtocolError(message)
    return number


def _aux(aux: object) -> bytes:
    if not isinstance(aux, bytes | bytearray | memoryview):
        message = f"aux is of type {type(aux).__name__}, must be bytes"
        raise ProtocolError(message)
    if memoryview(aux).nbytes > MAX_AUX_BYTES:
        message = f"aux has {memoryview(aux).nbytes} bytes, at most {MAX_AUX_BYTES} are carried"
        raise ProtocolError(message)
    return bytes(aux)
