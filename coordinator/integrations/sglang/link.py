"""One prefill scheduler's tie to its coordinator.

Theory of operation
    Each rank tells the coordinator when prefill of a request is complete, how its own transfer has
    ended, and when nothing reads the pages of a failed request any more. The coordinator decides.

    All ranks must retire a request in the same step. So verdicts are applied only in ``apply``, up to
    the token that rank 0 has sent along in the scheduler's broadcast of this step. All that decides
    what the scheduler sees (``told``, ``decided``, ``released``) changes only there, or where all ranks
    do the same in the same step anyway. What arrives from the transfer's threads is only told on.

    **Off** means that the coordinator does not decide: it is away, or a rank of this engine is not
    heard. Rank 0 says so in its carrier, and SGLang's own poll goes on from the same step on, on all
    ranks. What is in flight stays watched. When the coordinator is back, what it does not know any more
    is told again.

    A failure that is the coordinator's own fault (it was restarted, it drains, it is full) fails no
    request: that one is told again, or handed back to SGLang's own poll until the coordinator returns.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from coordinator.client.standing import RankState
from coordinator.client.supervised import SupervisedRank
from coordinator.client.token import Token
from coordinator.errors import ClosedError, CoordinatorError, RefusedError
from coordinator.integrations.sglang.carrier import Carrier
from coordinator.integrations.sglang.herald import Herald
from coordinator.integrations.sglang.watched import Poll, Watched, drained
from coordinator.messages import Outcome
from coordinator.reasons import Fault, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from coordinator.client.settings import ClientSettings
    from coordinator.integrations.sglang.watched import Manager, Sender, Target
    from coordinator.messages import Event, Released
    from coordinator.reasons import Failure

_MAX_ROOM: Final = 2**64 - 1
#: What SGLang notes when the client of a request has gone.
_ABORTED: Final = "Aborted by AbortReq."
#: The coordinator would not take it, for reasons that are not the request's.
_NOT_TAKEN: Final = {Reason.REJECTED, Reason.INCOMPATIBLE}

logger = logging.getLogger(__name__)


class Link:
    """What is told to the coordinator, and what is applied.

    Attributes:
        manager: SGLang's, of this rank.
        on: the coordinator decides; the same on all ranks in each step.
        due: something has been applied that the scheduler has not seen.
        inside: the scheduler is asking for the states of what is in flight.
        leads: this is rank 0.
        world_size: how many ranks there are.

    """

    def __init__(
        self, manager: Manager, address: str, group: str, rank: int, world_size: int, settings: ClientSettings
    ) -> None:
        """Begin to talk to the coordinator.

        Raises:
            CoordinatorError: the address, a name or a key cannot be used.

        """
        self.manager = manager
        self.on = False
        self.due = False
        self.inside = False
        self.leads = rank == 0
        self.world_size = world_size
        self._address = address
        self._client = SupervisedRank.connect(
            address, group=group, rank=rank, world_size=world_size, settings=settings
        )
        self._herald = Herald(self._tell_decode)
        # Between the scheduler's thread and those of transfers. SGLang calls us while we call it.
        self._lock = threading.RLock()
        self._watched: dict[int, Watched] = {}
        self._untold: dict[int, Watched] = {}
        self._undrained: dict[int, Watched] = {}
        # Rooms that SGLang has retired by itself, of which a verdict is still to come.
        self._ghosts: set[int] = set()
        self._carrier: Carrier | None = None
        self._complained = False

    def close(self) -> None:
        """Leave the coordinator."""
        self._client.close()

    @property
    def waiting(self) -> int:
        """How many requests the coordinator decides about."""
        return len(self._watched) - len(self._untold)

    # --- rank 0: what all ranks are to do in this step ------------------------------------------

    def news(self) -> Carrier | None:
        """Return what all ranks are to apply, if that has changed since it was applied last."""
        last, client = self._carrier, self._client
        if last is not None and last.on and client.head == last.token and client.state is RankState.READY:
            return None
        token = client.ready_head()
        if token is not None:
            carrier = Carrier(on=True, token=token)
        else:
            # Rank 0 says in its token when the coordinator is lost; nothing else is certain to be there.
            head = client.head
            kept = b"" if last is None else last.token
            carrier = Carrier(on=False, token=head if Token.unpack(head).lost else kept)
        return None if carrier == last or (last is None and not carrier.on) else carrier

    # --- every rank, in the step in which rank 0's carrier arrives --------------------------------

    def apply(self, carrier: Carrier) -> None:
        """Apply what rank 0 has sent along.

        Raises:
            NotReadyError: this rank lacks events that every rank has; it cannot go on with the others.

        """
        with self._lock:
            last, self._carrier = self._carrier, carrier
            if carrier.token and (last is None or carrier.token != last.token):
                for event in self._drain(carrier.token):
                    self._take(event)
            if carrier.on is not self.on:
                self._switch(carrier.on)
            if self.on:
                for watched in list(self._untold.values()):
                    self._tell(watched)

    def _drain(self, token: bytes) -> Sequence[Event]:
        try:
            return self._client.drain(through=token)
        except (RefusedError, ClosedError) as error:
            # All that the token tells of was drained before, and rank 0 will see that we are gone.
            self._complain(error)
            return ()

    def _switch(self, on: bool) -> None:  # noqa: FBT001 - it is what the carrier says
        self.on = on
        self.due = True
        self._complained = False
        if on:
            for watched in self._untold.values():
                watched.handed_back = False
            logger.info("the coordinator at %s decides about what is in flight", self._address)
        else:
            logger.warning(
                "the coordinator at %s is not there: SGLang's own poll goes on with %d requests, without a "
                "bound on their wait, until it is back", self._address, len(self._watched),
            )  # fmt: skip

    def _take(self, event: Event) -> None:
        watched = self._watched.get(event.room)
        if not isinstance(event, Outcome):
            self._take_release(watched, event)
        elif event.room in self._ghosts:
            self._ghosts.discard(event.room)
            self._say(self._client.leg_quiet, event.room, event.attempt)  # SGLang has given its pages back
        elif watched is not None and watched.told and not watched.decided:
            self._take_outcome(watched, event)

    def _take_outcome(self, watched: Watched, outcome: Outcome) -> None:
        failure = outcome.failure
        if failure is not None and (failure.fault is Fault.COORDINATOR or failure.reason in _NOT_TAKEN):
            # What becomes of the pages is the next attempt's affair, or SGLang's own; this one frees none.
            self._say(self._client.leg_quiet, watched.room, outcome.attempt)
            watched.told = False
            watched.handed_back = failure.reason is not Reason.COORDINATOR_RESTARTED
            self._untold[watched.room] = watched
            if watched.handed_back:
                logger.warning("room %d: SGLang's own poll goes on: %s", watched.room, failure.message)
            return
        watched.decided = True
        watched.attempt = outcome.attempt
        watched.failure = failure
        if failure is None:
            self.due = True
            return
        self.manager.record_failure(watched.room, _sentence(failure))
        self.manager.update_status(watched.room, Poll.FAILED)
        self._look(watched)

    def _take_release(self, watched: Watched | None, released: Released) -> None:
        if watched is None or watched.failure is None or watched.attempt != released.attempt:
            return
        watched.released = self.due = True
        # Not before: decode uses its pages again when it hears of it, and some rank might still write.
        self._herald.failed(watched.targets, watched.room, _sentence(watched.failure))

    # --- the scheduler ----------------------------------------------------------------------------

    def begin(self, sender: Sender) -> Watched | None:
        """Prefill of a request is complete, and its last pages are about to be sent."""
        room = sender.bootstrap_room
        if getattr(sender, "kv_mgr", None) is not self.manager or not 0 < room <= _MAX_ROOM:
            return None
        with self._lock:
            if room in self._watched or room in self._ghosts:
                return None  # A room that is used twice at a time is SGLang's affair.
            targets = self.manager._room_notify_targets(room)  # noqa: SLF001 - SGLang's own way to ask
            watched = self._watched[room] = self._untold[room] = Watched(room, sender, targets)
            if self.on:
                self._tell(watched)
        return watched

    def begun(self, watched: Watched) -> None:
        """Its last pages are in SGLang's queue; its transfer may be over already."""
        with self._lock:
            self._look(watched)

    def answer(self, sender: Sender) -> Poll | None:
        """Return what the scheduler is to see of a sender; None: its own poll tells."""
        watched = self._watched.get(sender.bootstrap_room)
        if watched is None or watched.sender is not sender or not watched.told:
            return None
        answer = watched.answer
        if answer is Poll.SUCCESS:
            sender.poll()  # It notes by itself how long it took.
        return answer

    def retired(self, senders: Iterable[Sender]) -> None:
        """The scheduler has done with these."""
        with self._lock:
            for sender in senders:
                room = sender.bootstrap_room
                watched = self._watched.get(room)
                if watched is None or watched.sender is not sender:
                    continue
                del self._watched[room]
                self._untold.pop(room, None)
                self._undrained.pop(room, None)
                if watched.failure is not None and not watched.quiet_told:
                    # SGLang has given its pages back by itself.
                    self._say(self._client.leg_quiet, room, watched.attempt)
                if watched.told and not watched.decided:
                    self._ghosts.add(room)
                    self._say(self._client.cancel, room, "SGLang has retired it without the coordinator")

    def retired_all_but(self, senders: Iterable[Sender]) -> None:
        """Some request has left the queue without being retired there: only these are in it."""
        present = {id(sender) for sender in senders}
        with self._lock:
            gone = [watched.sender for watched in self._watched.values() if id(watched.sender) not in present]
            self.retired(gone)

    def sweep(self) -> None:
        """Look whether workers have done with what has ended; SGLang does not always say so."""
        if self._undrained:
            with self._lock:
                for watched in list(self._undrained.values()):
                    self._look(watched)

    # --- SGLang's other threads -------------------------------------------------------------------

    def looked_at(self, room: int) -> None:
        """Something has become of a room's transfer."""
        watched = self._watched.get(room)
        if watched is not None:
            with self._lock:
                if self._watched.get(room) is watched:
                    self._look(watched)

    # --- inside -----------------------------------------------------------------------------------

    def _tell(self, watched: Watched) -> None:
        """Have the coordinator decide about a request that it does not know."""
        if watched.handed_back:
            return
        watched.told = True
        watched.quiet_told = False
        del self._untold[watched.room]
        self._say(self._client.complete, watched.room)
        if watched.ended is not None:
            self._tell_end(watched)

    def _look(self, watched: Watched) -> None:
        """See how far this rank's own transfer is, and tell what is new."""
        room = watched.room
        status = self.manager.request_status.get(room)
        is_drained = drained(self.manager, room)
        if watched.failure is not None:
            if is_drained and not watched.quiet_told:
                watched.quiet_told = True
                self._say(self._client.leg_quiet, room, watched.attempt)
            waits = not watched.quiet_told
        elif watched.ended is not None or status not in {Poll.SUCCESS, Poll.FAILED}:
            waits = False
        elif status == Poll.SUCCESS and not is_drained:
            waits = True
        else:
            waits = False
            watched.ended = Poll(status)
            watched.error = self.manager.failure_records.get(room, "") if status == Poll.FAILED else ""
            if watched.told:
                self._tell_end(watched)
        if waits:
            self._undrained[room] = watched
        else:
            self._undrained.pop(room, None)

    def _tell_end(self, watched: Watched) -> None:
        if watched.ended is Poll.SUCCESS:
            self._say(self._client.leg_done, watched.room)
        elif watched.error == _ABORTED:
            self._say(self._client.cancel, watched.room, "the client of the request has gone")
        else:
            # Whether it is quiet is told after the verdict, as by all ranks.
            self._say(self._client.leg_failed, watched.room, watched.error or "SGLang gave no reason")

    def _say(self, method: Callable[..., None], room: int, *rest: str | int) -> None:
        try:
            method(room, *rest)
        except CoordinatorError as error:
            # The others go on; without our word it fails at its deadline, on all ranks.
            self._complain(error)

    def _complain(self, error: CoordinatorError) -> None:
        if not self._complained:
            self._complained = True
            logger.error("the coordinator at %s hears nothing from this rank: %s", self._address, error)

    def _tell_decode(self, target: Target, room: int, reason: str) -> None:
        self.manager.send_kv_status_message(
            targets=[target], bootstrap_room=room, status=Poll.FAILED, failure_reason=reason
        )


def _sentence(failure: Failure) -> str:
    origin = f" (from {failure.origin})" if failure.origin else ""
    return f"{failure.reason.value}: {failure.message}{origin}"
