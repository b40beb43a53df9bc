"""The control socket: every frame of a rank or a worker comes in here and is validated here.

Nothing that arrives can raise into the reader: a frame that is no message is counted, logged (not
more often than the log can bear) and answered with the reason.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from coordinator.broadcast import MAX_EVENTS, fitting
from coordinator.errors import ProtocolError
from coordinator.groups import Rank
from coordinator.items import Items
from coordinator.logs import get_logger
from coordinator.messages import (
    VERSION,
    Bye,
    Hello,
    Refused,
    Reports,
    Resend,
    Submit,
    Welcome,
    WhoAreYou,
    WorkerBye,
    WorkerHello,
    decode_from_peer,
    encode,
)
from coordinator.reasons import Reason
from coordinator.succession import succeed
from coordinator.worker.hosted import HostedWorker
from coordinator.worker.supervisor import Worker

if TYPE_CHECKING:
    from msgspec import Struct

    from coordinator.broadcast import Broadcaster
    from coordinator.channel import Channel
    from coordinator.config import Config
    from coordinator.groups import Group
    from coordinator.membership import Membership
    from coordinator.metrics import Counters
    from coordinator.reattach import Reattach
    from coordinator.rooms import Rooms
    from coordinator.transfers import Transfers

#: A broken sender gets one log line at once and then at most one per this long.
COMPLAINT_PAUSE_S: Final = 10.0
#: Frames: the sender's routing id and the payload.
FRAMES: Final = 2

_log = get_logger()


class Control:
    """Knows who is behind each routing id, and hands each message to whom it concerns."""

    def __init__(
        self,
        config: Config,
        epoch: int,
        membership: Membership,
        rooms: Rooms,
        transfers: Transfers,
        broadcaster: Broadcaster,
        counters: Counters,
    ) -> None:
        """Start with no session; the public attributes are set before any frame.

        ``lodging``: ranks run their workers themselves.
        """
        self.channel: Channel
        self.reattach: Reattach
        self.outcomes: dict[str, str] = {}
        self.lodging = False
        self._config = config
        self._epoch = epoch
        self._membership = membership
        self._items = Items(rooms, counters)
        self._transfers = transfers
        self._broadcaster = broadcaster
        self._counters = counters
        self._sessions: dict[bytes, Rank | Worker] = {}
        self._identities: dict[Rank | Worker, bytes] = {}
        self._heard: dict[Group, None] = {}
        self._complained_at_s = float("-inf")
        self._complaints = 0

    def on_message(self, frames: list[bytes]) -> None:
        """Take one message from the socket."""
        identity = frames[0]
        if len(frames) != FRAMES:
            self._malformed(identity, f"{len(frames) - 1} frames, must be one")
            return
        frame = frames[1]
        if len(frame) > self._config.limits.max_frame_bytes:
            bound = self._config.limits.max_frame_bytes
            self._malformed(identity, f"{len(frame)} bytes, limits.max_frame_bytes is {bound}")
            return
        try:
            message = decode_from_peer(frame)
        except ProtocolError as error:
            self._malformed(identity, str(error))
            return
        match message:
            case Submit():
                self._submit(identity, message)
            case Reports():
                self._reports(identity, message)
            case Hello():
                self._hello(identity, message)
            case WorkerHello():
                self._worker_hello(identity, message)
            case WorkerBye():
                self._worker_bye(message)
            case Bye():
                self._bye(identity, message)

    def forget(self, member: Rank | Worker) -> None:
        """Drop the session of a rank or worker that is lost."""
        identity = self._identities.pop(member, None)
        if identity is not None and self._sessions.get(identity) is member:
            del self._sessions[identity]

    def _remember(self, identity: bytes, member: Rank | Worker) -> None:
        """Give a member its session; it has one only, and may come back under another identity."""
        self.forget(member)
        self._sessions[identity] = member
        self._identities[member] = identity

    # Ranks

    def _hello(self, identity: bytes, hello: Hello) -> None:
        refused = succeed(self._membership, self.reattach, hello)
        if refused is not None:
            self._answer(identity, refused)
        elif hello.epoch not in {0, self._epoch} and hello.memory is None:
            self._answer(identity, WhoAreYou(self._epoch))
        elif hello.epoch not in {0, self._epoch} or self.reattach.awaits(hello):
            self.reattach.hello(hello, identity)
        else:
            self.answer_hello(hello, identity, self._membership.hello(hello, identity, self._epoch))

    def answer_hello(self, hello: Hello, identity: bytes, rank: Rank | Refused) -> None:
        """Welcome a rank that has its place, or refuse it."""
        if isinstance(rank, Refused):
            self._answer(identity, rank)
            return
        self._remember(identity, rank)
        group = rank.group
        events = fitting(group.log.since(rank.acknowledged, MAX_EVENTS))  # the rank asks for the rest
        if events and hello.epoch == self._epoch:
            self._counters.replays += 1
            self._counters.replayed_events += len(events)
        outcomes = self.outcomes.get(hello.transport) or next(iter(self.outcomes.values()))
        crew = self._transfers.crews.get(rank)
        welcome = Welcome(
            epoch=self._epoch,
            outcomes=outcomes,
            first=rank.acknowledged + 1,
            events=events,
            stable=group.stable,
            received=rank.received,
            heartbeat_s=self._config.rank.heartbeat_s,
            lineage=group.lineage,
            worker=crew.worker.orders if crew is not None else None,
        )
        self._answer(identity, welcome)
        self.note(group)

    def _submit(self, identity: bytes, submit: Submit) -> None:
        rank = self._sessions.get(identity)
        if not isinstance(rank, Rank) or submit.epoch != self._epoch:
            self._answer(identity, WhoAreYou(self._epoch))
            return
        group = rank.group
        if submit.acknowledged > group.log.head or submit.applied > group.log.head:
            self._malformed(identity, f"acknowledges event {submit.acknowledged} of {group.log.head}")
            return
        self._membership.sign(rank)
        if submit.acknowledged > rank.acknowledged or submit.listening is not rank.listening:
            rank.acknowledged = max(rank.acknowledged, submit.acknowledged)
            rank.listening = submit.listening
            self.note(group)
        known = rank.received + 1 - submit.first
        if known < 0:
            self._answer(identity, Resend(rank.received))
            return
        for item in submit.items[known:]:
            rank.received += 1
            refusal = self._items.handle(rank, item)
            if refusal is not None:
                self._answer(identity, refusal)
        # Last, and not over a gap: the engine may have drained a verdict after it said these items.
        if submit.applied > rank.applied:
            rank.applied = submit.applied
            group.drained()

    def _bye(self, identity: bytes, bye: Bye) -> None:
        rank = self._sessions.get(identity)
        if isinstance(rank, Rank):
            reason = Reason.RANK_LOST if rank.group.role == "prefill" else Reason.PEER_LOST
            message = f"{rank.name} left: {bye.why or 'closed'}"
            self._membership.lose(rank, reason, message, gone=False, left=True)

    def note(self, group: Group) -> None:
        """Work out once per turn of the loop, not per message, what a group has heard."""
        if not self._heard:
            asyncio.get_running_loop().call_soon(self._settle_heard)
        self._heard[group] = None

    def _settle_heard(self) -> None:
        heard, self._heard = self._heard, {}
        for group in heard:
            ready = group.ready
            if group.heard():
                self._broadcaster.publish(group)
            if group.ready is not ready:
                _log.info(
                    "group.ready" if group.ready else "group.not_ready",
                    group=group.name,
                    missing=group.missing(),
                )

    # Workers

    def _worker_hello(self, identity: bytes, hello: WorkerHello) -> None:
        if hello.version != VERSION:
            self._malformed(identity, f"worker speaks protocol {hello.version}, this coordinator {VERSION}")
            return
        for crew in self._transfers.crews.values():
            worker = crew.worker
            if worker.token and worker.token == hello.token:
                worker.up(identity, lands_after_settled=hello.lands_after_settled)
                self._remember(identity, worker)
                self._transfers.worker_up(worker)
                return
        if self.lodging:
            # It outlives a coordinator, and its rank is still to be told of the next one.
            self._answer(identity, Refused("unknown", "no rank here has a worker with this token"))
        else:
            self._malformed(identity, "a worker with an unknown token")

    def _worker_bye(self, bye: WorkerBye) -> None:
        for crew in self._transfers.crews.values():
            worker = crew.worker
            if isinstance(worker, HostedWorker) and worker.token == bye.token:
                worker.ended(bye.why)
                return

    def _reports(self, identity: bytes, reports: Reports) -> None:
        worker = self._sessions.get(identity)
        if not isinstance(worker, Worker) or worker.identity != identity:
            self._malformed(identity, "reports of an unknown worker")
            return
        for report in reports.items:
            self._transfers.report(worker, report)

    # Answers

    def _answer(self, identity: bytes, message: Struct) -> None:
        # A peer that does not read misses an answer; it asks again, or is lost when it is silent.
        self.channel.send([identity, encode(message)])

    def _malformed(self, identity: bytes, problem: str) -> None:
        self._counters.malformed += 1
        self._complaints += 1
        now_s = asyncio.get_running_loop().time()
        session = self._sessions.get(identity)
        if now_s - self._complained_at_s >= COMPLAINT_PAUSE_S:
            sender = session.name if session is not None else identity.hex()
            _log.warning("control.malformed", sender=sender, error=problem, count=self._complaints)
            self._complained_at_s, self._complaints = now_s, 0
        self._answer(identity, Refused("malformed", problem))
