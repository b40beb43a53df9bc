"""The requests that one client has at its coordinator.

Theory of operation
    vLLM is told of a request's end once, on each rank, and not before its blocks are quiet: when its
    ``Released`` has been drained. A failure is told once, when its ``Outcome`` has been drained, so that the
    client of the request need not wait for the blocks.

    A room may be used again while its former use is not released here. What is said of the new request
    waits until then, so that nobody takes the one's verdict for the other's.

    Where one rank reports for all (see ``executor``), every rank drains up to the token that comes with the
    step, and at no other time.

    What cannot be said (the client is broken, or its queue is full) fails the request. Its pages are quiet
    if nobody has been told of them. Else they are held, for ever if it must be.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from coordinator.client.rank import DecodeRank, PrefillRank
from coordinator.errors import ClosedError, CoordinatorError, RefusedError
from coordinator.integrations.vllm.orders import Cancel, Extend, Offer, Open, Send
from coordinator.messages import Outcome

if TYPE_CHECKING:
    from coordinator.client.rank import Rank
    from coordinator.integrations.vllm.orders import Order
    from coordinator.messages import Event

_SPENT: Final = "the client at %s does not work any more: %s"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """What vLLM is to be told.

    Attributes:
        quiet: requests whose blocks may be used again.
        failed: requests whose KV does not come.
        spoilt: the blocks of these.

    """

    quiet: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    spoilt: set[int] = field(default_factory=set)

    def add(self, other: Results) -> None:
        """Tell also what another one tells."""
        self.quiet |= other.quiet
        self.failed |= other.failed
        self.spoilt |= other.spoilt


@dataclass(slots=True)
class Use:
    """One request's use of a room.

    Attributes:
        request: vLLM's id.
        pages: those that it has here, whose end vLLM waits for; none so far.
        owed: enough was said of it that its outcome will come, whatever happens.
        closing: nothing more is said of it.
        decided: its outcome has been drained.
        attempt: which attempt the outcome was of.
        released: nothing moves at its pages.
        failed: vLLM has been told that it failed.
        later: what is to be said of the requests that want the room next.

    """

    request: str
    pages: list[int] | None = None
    owed: bool = False
    closing: bool = False
    decided: bool = False
    attempt: int = 0
    released: bool = False
    failed: bool = False
    later: list[Order] = field(default_factory=list)


class Desk:
    """One client of this rank, and who has its rooms. Calls come from the engine's thread."""

    def __init__(self, client: Rank, address: str, *, by_token: bool = False) -> None:
        """Take a client that is connected to the coordinator at ``address``.

        ``by_token``: what has arrived is drained by ``follow`` alone.
        """
        self._client = client
        self._address = address
        self._by_token = by_token
        self._uses: dict[int, Use] = {}
        self._results = Results()
        self._broken = False

    def close(self) -> None:
        """Leave the coordinator."""
        self._client.close()

    @property
    def head(self) -> bytes:
        """The token of the last event that all live ranks have."""
        return self._client.head

    def follow(self, token: bytes) -> None:
        """Take what has arrived up to a token.

        Raises:
            NotReadyError: this rank lacks what rank 0 has; it cannot go on with the others.

        """
        self._drain(token)

    def results(self) -> Results:
        """Return what is new."""
        self._look()
        results, self._results = self._results, Results()
        return results

    def take(self, order: Order) -> None:
        """Do what the scheduler's half wants."""
        # What has arrived since belongs to a room's former use.
        self._look()
        self._do(order)

    def _do(self, order: Order) -> None:
        """Say it, or keep it until the room's former use is over."""
        use = self._uses.get(order.room)
        if use is not None and use.request != order.request:
            if use.owed:
                use.later.append(order)
                return
            del self._uses[order.room]
        self._say(order)

    # --- what is said ------------------------------------------------------------------------

    def _say(self, order: Order) -> None:
        try:
            match order:
                case Open() | Extend():
                    self._announce(order)
                case Send() | Offer():
                    self._hand_over(order)
                case Cancel():
                    self._cancel(order)
        except CoordinatorError as error:
            self._unsaid(order, error)
        self._settle(order.room)

    def _announce(self, order: Open | Extend) -> None:
        use = self._uses.setdefault(order.room, Use(order.request))
        if use.decided:
            return
        if isinstance(self._client, PrefillRank):
            use.owed = True
            self._client.open(order.room)
        elif isinstance(self._client, DecodeRank):
            self._client.extend(order.room)

    def _hand_over(self, order: Send | Offer) -> None:
        use = self._uses.setdefault(order.room, Use(order.request))
        use.pages = order.pages
        if use.decided:
            # It has failed before anybody heard of its pages.
            use.released = True
            self._fail(use)
            return
        use.owed = True
        if isinstance(order, Send) and isinstance(self._client, PrefillRank):
            self._client.send(order.room, order.pages, last=True)
        elif isinstance(order, Offer) and isinstance(self._client, DecodeRank):
            self._client.offer(order.room, order.pages, order.prefix_pages)

    def _cancel(self, order: Cancel) -> None:
        use = self._uses.get(order.room)
        if use is not None:
            use.closing = True
            if not use.owed:
                del self._uses[order.room]
        # Prefill has spoken of all that it can cancel; decode cancels also what it never came to offer.
        if not use.decided if use is not None else isinstance(self._client, DecodeRank):
            self._client.cancel(order.room, order.why)

    def _unsaid(self, order: Order, error: CoordinatorError) -> None:
        logger.error("request %s: %s could not be said: %s", order.request, type(order).__name__, error)
        use = self._uses.get(order.room)
        if use is None:
            return
        if isinstance(order, Send | Offer):
            # Nobody has heard of its pages.
            use.decided = use.released = True
            self._fail(use)
        elif use.pages is None:
            del self._uses[order.room]

    # --- what comes --------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._by_token:
            self._drain(None)

    def _drain(self, token: bytes | None) -> None:
        if self._broken:
            return
        try:
            for event in self._client.drain(through=token):
                self._apply(event)
        except (RefusedError, ClosedError) as error:
            self._broken = True
            logger.error(_SPENT, self._address, error)  # noqa: TRY400 - the text says it all
            self._give_up()

    def _apply(self, event: Event) -> None:
        use = self._uses.get(event.room)
        if use is None:
            return
        if isinstance(event, Outcome):
            use.decided = True
            use.attempt = event.attempt
            if event.failure is not None:
                logger.warning(
                    "request %s (room %d) failed: %s: %s",
                    use.request, event.room, event.failure.reason.value, event.failure.message,
                )  # fmt: skip
                self._fail(use)
        elif use.decided and use.attempt == event.attempt:
            use.released = True
            self._settle(event.room)

    def _give_up(self) -> None:
        """Nothing comes any more: who waits is told so; pages that others know of stay held."""
        for room, use in list(self._uses.items()):
            if not use.decided:
                use.decided = True
                self._fail(use)
            self._settle(room)

    def _fail(self, use: Use) -> None:
        if use.pages is not None and not use.failed:
            use.failed = True
            self._results.failed.add(use.request)
            self._results.spoilt.update(use.pages)

    def _settle(self, room: int) -> None:
        """End the use of a room whose pages are quiet, and let the next one begin."""
        use = self._uses.get(room)
        if use is None or not use.released or (use.pages is None and not use.closing):
            return
        del self._uses[room]
        if use.pages is not None:
            self._results.quiet.add(use.request)
        # Without a look: events that came before what it finds may still have to be applied.
        for order in use.later:
            self._do(order)
