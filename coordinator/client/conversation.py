"""What a rank says to its coordinator, and what it makes of the answers.

Sans-IO: no socket, no clock, no lock. The I/O thread brings what arrived and the time, and sends
what ``next_message`` returns; a test can do the same with a lossy network and a clock of its own.

Theory of operation
    A rank says ``Hello`` until ``Welcome`` comes. Then it is joined: it submits items, and gives a
    sign of life every ``heartbeat_s``. It says ``Hello`` again when

    - events are missing (the answer brings all that it has not acknowledged);
    - the coordinator does not know it, or a broadcast is of another epoch (a new coordinator, to
      whom it reports what it remembers);
    - the connection took nothing more, or nothing was heard for ``away_after_s``.

    In the last two cases it is not joined until the next ``Welcome``; what the engine says
    meanwhile waits in the outbox, within its bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.client.hellos import Hellos
from coordinator.client.inbox import NO_EPOCH, Head, Inbox
from coordinator.client.outbox import Outbox
from coordinator.client.recollection import Recollection
from coordinator.client.standing import RankState, Standing
from coordinator.errors import QueueFullError, RefusedError
from coordinator.messages import MAX_ITEMS, Hello, Refused, Resend, Submit, Welcome, WhoAreYou

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.client.settings import ClientSettings
    from coordinator.errors import CoordinatorError
    from coordinator.messages import Broadcast, Event, Item, ToRank, WorkerOrders

#: A batch of items ends beyond this many bytes, so that no frame holds up the next for long.
BATCH_BYTES: Final = 1 << 18
#: Two rewinds that the coordinator asks for are at least this far apart.
_REWIND_INTERVAL_S: Final = 0.1
_MIN_HEARTBEAT_S: Final = 0.05
_NEVER: Final = float("inf")


class Conversation:
    """One rank's side of the protocol, until its coordinator is lost; see ``coordinator.client.lives``.

    Attributes:
        hello: how the rank introduces itself.
        inbox, outbox: what was heard and what is to be said.
        standing: the state, and what went wrong.
        joined: items may be submitted.
        used: the engine has spoken, or drained what some coordinator had told its group.
        news: something changed since the engine drained last: events, the head, a refusal, a fault.
        drained_through: what the engine gave to ``drain`` last; all that it reached is drained.
        outcomes: address to subscribe to; empty before the first ``Welcome``.
        orders: for the worker that this rank is to run itself; None when it is to run none.
        connections: counted up when the sockets must be made anew.

    """

    def __init__(
        self,
        hello: Hello,
        address: str,
        settings: ClientSettings,
        now_s: float,
        standing: Standing | None = None,
    ) -> None:
        """Prepare to introduce the rank with ``hello`` to the coordinator at ``address``."""
        name = f"{hello.group}/{hello.rank}"
        self.standing = standing or Standing(name, address, settings.coordinator_lost_s)
        self.inbox = Inbox(settings.undrained_events)
        self.outbox = Outbox()
        self._recollection = Recollection()
        # What ``next_message`` has handed out last: the connection takes it, or ``blocked`` follows.
        self._handed_out: Sequence[Item] = ()
        self.news = self.used = False
        self.drained_through: bytes | None = None
        self.outcomes = ""
        self._lineage = 0
        self.orders: WorkerOrders | None = None
        self.connections = 0
        self.hello = hello
        self._settings = settings
        self._hellos = Hellos(settings.hello_retry_s, now_s)
        self._endpoint_moved = False
        self.joined = False
        self._asked = False
        self._blocked = False
        self._listening = False
        self._acknowledge = False
        self._heartbeat_s = 1.0
        self._submit_at_s = now_s
        self._heard_at_s = now_s
        self._confirmed_at_s = now_s
        self._rewound_at_s = -_NEVER

    # --- the engine's side -------------------------------------------------------------------

    def say(self, item: Item, size_bytes: int) -> None:
        """Queue an item.

        Raises:
            QueueFullError: the coordinator has not confirmed what fills the queue.
            CoordinatorError: the fault, if there is one.

        """
        self.standing.check()
        self.used = True
        outbox, settings = self.outbox, self._settings
        if len(outbox) >= settings.queue_items or outbox.size_bytes + size_bytes > settings.queue_bytes:
            message = (
                f"{self.standing.name}: {len(outbox)} calls with {outbox.size_bytes} bytes wait for the "
                f"coordinator at {self.standing.address} (bounds: {settings.queue_items} calls, "
                f"{settings.queue_bytes} bytes); {self.standing.explain()}"
            )
            raise QueueFullError(message)
        outbox.put(item, size_bytes)
        self._recollection.spoke(item)

    def drain(self, through: Head | None) -> list[Event]:
        """Hand over the events up to ``through``, or all; the inbox must reach it.

        Raises:
            CoordinatorError: the fault, if there is one and no event is left.

        """
        # A token of no epoch means nothing yet.
        self.used = self.used or bool(len(self.inbox)) or (through is not None and through.epoch != NO_EPOCH)
        self.news = self.standing.fault is not None
        events = self.inbox.drain() if through is None else self.inbox.drain_through(through)
        self.drained_through = None if through is None else through.pack()
        if not events:
            self.standing.check()
        return events

    def behind(self, head: Head, wait_s: float) -> str:
        """Say that this rank does not reach ``head`` although it waited."""
        return (
            f"{self.standing.name} was asked to drain through event {head.number} of epoch "
            f"{head.epoch:#x}, but after {wait_s} s it has only up to event {self.inbox.have} of epoch "
            f"{self.inbox.epoch:#x}; {self.standing.explain()}"
        )

    def fail(self, state: RankState, fault: CoordinatorError) -> None:
        """End the conversation."""
        self.standing.fail(state, fault)
        self.news = True

    # --- the network's side ------------------------------------------------------------------

    def next_message(self, now_s: float) -> Hello | Submit | None:
        """Return what is to be sent now; None when there is nothing (more)."""
        self._recollection.submitted(self._handed_out)
        self._handed_out = ()
        if self._blocked or self.standing.fault is not None:
            return None
        if now_s >= self._hellos.due_s:
            return self._introduce(now_s)
        if self.joined and (self.outbox.unsent or self._acknowledge or now_s >= self._submit_at_s):
            return self._submit(now_s)
        return None

    def blocked(self, now_s: float) -> None:
        """The connection did not take the last message: it is down, or its queue is full."""
        self._blocked = True
        self._handed_out = ()
        # What was said may be lost with the connection: no answer to it is awaited.
        self._hellos.answered()
        self._leave(now_s)
        if self.inbox.epoch != NO_EPOCH:
            self.standing.become(RankState.COORDINATOR_AWAY)

    def unblocked(self) -> None:
        """The connection takes messages again."""
        self._blocked = False

    def tick(self, now_s: float) -> None:
        """Judge what did not happen in time."""
        if not self.joined:
            if self._hellos.given_up(now_s):
                self.connections += 1
            return
        if now_s - self._heard_at_s > self._settings.away_after_s:
            self.connections += 1
            self._listening = False
            self._leave(now_s)
            self.standing.become(RankState.COORDINATOR_AWAY)
        elif (
            self.outbox.sent > self.outbox.confirmed
            and now_s - self._confirmed_at_s > self._settings.resend_after_s
        ):
            self._rewind(now_s)

    def due_s(self) -> float:
        """When ``tick`` or ``next_message`` will have something to do, if nothing arrives."""
        due_s = _NEVER if self._blocked else self._hellos.due_s
        if self.joined:
            due_s = min(due_s, self._heard_at_s + self._settings.away_after_s)
            if self.outbox.sent > self.outbox.confirmed:
                due_s = min(due_s, self._confirmed_at_s + self._settings.resend_after_s)
            if not self._blocked:
                due_s = min(due_s, 0.0 if self.outbox.unsent or self._acknowledge else self._submit_at_s)
        return due_s

    def endpoint_moved(self, endpoint: bytes, now_s: float) -> None:
        """The rank can be reached at ``endpoint`` from now on: say so, as the same rank."""
        self.hello = msgspec.structs.replace(self.hello, endpoint=endpoint)
        self._endpoint_moved = True
        self._hellos.ask(now_s)

    def hear(self, message: ToRank, now_s: float) -> None:
        """Take a message from the control connection."""
        if self.standing.fault is not None:
            return
        self._heard_at_s = now_s
        match message:
            case Welcome():
                self._join(message, now_s)
            case Refused():
                self._hellos.answered()
                self._grow_up(message.life, now_s)
                self.standing.refused(message)
                self.news = True
            case WhoAreYou():
                # One of another epoch asks what this rank remembers: a Hello without that is no answer.
                if not self._asked and self.inbox.epoch not in {NO_EPOCH, message.epoch}:
                    self._asked = True
                    self._hellos.answered()
                self._leave(now_s)
                self.standing.become(RankState.CONNECTING)
            case Resend() if self.joined:
                self._confirm(message.received, now_s)
                # Everything that was under way behind a gap is answered so; one rewind is enough.
                if now_s - self._rewound_at_s > _REWIND_INTERVAL_S:
                    self._rewind(now_s)

    def hear_broadcast(self, broadcast: Broadcast, now_s: float) -> None:
        """Take a broadcast to this rank's group."""
        if self.standing.fault is not None or self._is_over(broadcast.epoch):
            return
        self._heard_at_s = now_s
        if broadcast.epoch != self.inbox.epoch:
            # A new coordinator, which cannot know us.
            self._leave(now_s)
            self.standing.become(RankState.CONNECTING)
            return
        if not self._listening:
            self._listening = self._acknowledge = True
        self.standing.missing = broadcast.missing
        if self.hello.rank < len(broadcast.received):
            self._confirm(broadcast.received[self.hello.rank], now_s)
        self._take(broadcast.first, broadcast.events, broadcast.stable, now_s, ready=broadcast.ready)
        if self.joined:
            self.standing.become(RankState.READY if broadcast.ready else RankState.JOINED)

    # --- inside ------------------------------------------------------------------------------

    def _grow_up(self, life: int, now_s: float) -> None:
        """A rank that is new in its group joins it in the life in which it finds it."""
        if life > self.hello.life and self.inbox.epoch == NO_EPOCH and not self.used:
            self.hello = msgspec.structs.replace(self.hello, life=life)
            self._hellos.ask(now_s)

    def _introduce(self, now_s: float) -> Hello:
        self._hellos.said(now_s)
        self._endpoint_moved = False
        return msgspec.structs.replace(
            self.hello,
            epoch=self.inbox.epoch,
            acknowledged=self.inbox.have,
            confirmed=self.outbox.confirmed,
            memory=self._recollection.report(self.inbox.base, self._lineage) if self._asked else None,
        )

    def _submit(self, now_s: float) -> Submit:
        inbox, outbox = self.inbox, self.outbox
        if outbox.sent == outbox.confirmed:
            self._confirmed_at_s = now_s
        first = outbox.sent + 1
        items = [
            # It was said before this rank knew that it joins late.
            item if item.after >= inbox.base else msgspec.structs.replace(item, after=inbox.base)
            for item in outbox.take(MAX_ITEMS, BATCH_BYTES)
        ]
        self._handed_out = items
        self._acknowledge = False
        self._submit_at_s = now_s + self._heartbeat_s
        # What is still due may have been said before the engine drained the last events; those who count
        # as drained are forgotten, and then it would be taken for news.
        due = outbox.due
        applied = inbox.drained if due is None else min(inbox.drained, max(due.after, inbox.base))
        return Submit(inbox.epoch, first, inbox.have, applied, self._listening, items)

    def _join(self, welcome: Welcome, now_s: float) -> None:
        inbox, outbox = self.inbox, self.outbox
        if self._is_over(welcome.epoch):
            return  # It was under way when its coordinator was replaced.
        if inbox.epoch != NO_EPOCH and welcome.first > inbox.have + 1:
            if welcome.epoch != inbox.epoch or not self._is_new:
                self._fall_out(welcome)
                return
            # It joined a new coordinator before the others of its group did, who came with their past.
            inbox.skip(welcome.first)
        if welcome.epoch != inbox.epoch:
            inbox.enter(welcome.epoch, welcome.first)
            outbox.rebase(welcome.received)
            self._listening = False
            self.standing.missing = None
        else:
            self._confirm(welcome.received, now_s)
            outbox.rewind()
        self.joined = self._acknowledge = True
        self._asked = False
        self._hellos.welcomed()
        if self._endpoint_moved:
            self._hellos.ask(now_s)
        self._confirmed_at_s = now_s
        self._heartbeat_s = max(_MIN_HEARTBEAT_S, welcome.heartbeat_s)
        self._lineage = welcome.lineage
        self.outcomes = self.standing.outcomes = welcome.outcomes
        self.orders = welcome.worker
        if self.standing.state is not RankState.READY:
            self.standing.become(RankState.JOINED)
        self._take(welcome.first, welcome.events, welcome.stable, now_s)

    @property
    def _is_new(self) -> bool:
        """Whether this rank has neither said nor heard anything, so that no past concerns it."""
        return self.inbox.have == self.inbox.base and not self.outbox.confirmed and not len(self.outbox)

    def _is_over(self, epoch: int) -> bool:
        """Whether nothing of ``epoch`` counts any more.

        Once its memory is asked for, a rank must not hear another word of the epoch that it is in:
        the new coordinator would not know what this rank knows.
        """
        return self.inbox.is_past(epoch) or (self._asked and epoch == self.inbox.epoch)

    def _fall_out(self, welcome: Welcome) -> None:
        """Give up: the coordinator does not keep any more what this rank missed."""
        message = (
            f"{self.standing.name} has the events up to {self.inbox.have}, but the coordinator at "
            f"{self.standing.address} goes on with event {welcome.first}: this rank was away for too long "
            f"and cannot agree with its group any more; restart this engine"
        )
        self.fail(RankState.REFUSED, RefusedError(message))

    def _take(
        self, first: int, events: list[Event], stable: int, now_s: float, *, ready: bool = False
    ) -> None:
        inbox = self.inbox
        had, token = inbox.have, inbox.token
        if ready:
            inbox.group_ready()
        new = inbox.take(first, events, stable)
        if new:
            self._recollection.heard(had + 1, new)
            self._acknowledge = self.news = True
        if inbox.token != token:
            self.news = True
        # A full inbox takes no more: the coordinator keeps the rest until the engine has drained.
        if inbox.have < first + len(events) - 1 and not inbox.full:
            self._hellos.ask(now_s)

    def _leave(self, now_s: float) -> None:
        self.joined = False
        self._hellos.ask(now_s)

    def _confirm(self, received: int, now_s: float) -> None:
        if self.outbox.confirm(received):
            self._confirmed_at_s = now_s

    def _rewind(self, now_s: float) -> None:
        self.outbox.rewind()
        self._confirmed_at_s = self._rewound_at_s = now_s
