"""A rank's conversations with its coordinators, one after the other, as its engine sees them.

Sans-IO: no socket, no clock, no lock; whoever shares one between threads guards it.

Theory of operation
    One conversation outlives many coordinators, as long as each next one comes in time. When a rank
    has not been joined for ``coordinator_lost_s`` its coordinator is lost: every room in flight fails
    with ``coordinator_lost``, and a new conversation begins, as a new instance with no memory, towards
    whoever answers at the address. Nothing that arrives late from the former one is heard any more.

    **In lockstep** all ranks must do so in the same step. Rank 0 alone judges, and says it in its
    token; the others believe it, even one that is joined itself. Up to the token's number every live
    rank has the events; what some have beyond it is dropped, and those rooms fail with the others
    (``coordinator.client.ledger`` says why all ranks fail the same). As long as rank 0's engine has
    not taken that token, a coordinator that returns ends the matter; afterwards some rank may have
    acted on it, and rank 0 hears nothing until it has drained the token itself. An engine that
    drains without tokens goes by each rank's own judgement, whenever it drains.

    **Their pages** are released when it is proven that nothing moves there any more
    (``coordinator.client.proof``). Each rank proves it for itself, at its own time, and only rank 0
    can tell the others anything. So rank 0 says in its token that all is quiet, ``QUIET_HOLD_S`` after
    it was so with its own pages, and a rank that lacks its proof waits for it in ``drain``, as for
    events that it lacks. The alternatives are worse: through the next coordinator they would never
    come back where none follows, and a second exchange in every step is what tokens are there to
    avoid. Proofs need milliseconds, so nobody waits, unless one rank's pages really are in somebody's
    hands while rank 0's are not: then that rank's ``drain`` raises, naming it, rather than lets an
    engine's ranks differ or pages be used that may still be written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.client.conversation import Conversation
from coordinator.client.inbox import NO_EPOCH, Head
from coordinator.client.introduction import new_instance
from coordinator.client.ledger import Ledger
from coordinator.client.standing import RankState
from coordinator.client.token import Token
from coordinator.reasons import Failure, Reason

if TYPE_CHECKING:
    from coordinator.client.inbox import Inbox
    from coordinator.client.settings import ClientSettings
    from coordinator.messages import Broadcast, Event, Hello, Item, Submit, ToRank

#: How long rank 0 lets the others of its group come to their proofs before it counts on them.
QUIET_HOLD_S: Final = 1.0
_NEVER: Final = float("inf")

logger = logging.getLogger(__name__)


class Lives:
    """One rank's conversations.

    Attributes:
        conversation: the present one.
        inbox: of the present conversation.
        judged: the coordinator is lost, unless it returns before the engine takes that for a fact.
        flagged: ``head`` has more to say than the inbox's token.
        unproven: pages of lost coordinators' handoffs are not known to be quiet.
        demands: counted up whenever that has to be proven (anew).

    """

    def __init__(self, hello: Hello, address: str, settings: ClientSettings, now_s: float) -> None:
        """Begin the first conversation; see ``Conversation``."""
        self.conversation = Conversation(hello, address, settings, now_s)
        self.inbox: Inbox = self.conversation.inbox
        self.judged = False
        self.flagged = False
        self.unproven = False
        self.demands = 0
        self._address = address
        self._settings = settings
        self._leads = hello.rank == 0
        self._ledger = Ledger()
        self._alone_since_s = now_s
        # The token with which the engine has taken the judgement for a fact, while it is not drained.
        self._pronounced: bytes | None = None
        self._last_loss: Token | None = None
        self._quiet_at_s = _NEVER
        self._quiet = False

    @property
    def life(self) -> int:
        """How many coordinators this rank's group has lost."""
        return self.conversation.hello.life

    @property
    def unreleased(self) -> int:
        """How many handoffs with lost coordinators have pages that were not released."""
        return self._ledger.former

    # --- the engine's side -------------------------------------------------------------------

    def say(self, item: Item, size_bytes: int, inbox: Inbox) -> None:
        """Queue an item that was made when ``inbox`` was the present one; see ``Conversation.say``."""
        if inbox is not self.inbox:
            # Meanwhile another thread has drained that the coordinator is lost.
            if item.room in self._ledger.given_up:
                logger.info("room %d was given up before %s was said", item.room, type(item).__name__)
                return
            item = msgspec.structs.replace(item, after=0)
        self.conversation.say(item, size_bytes)
        self._ledger.spoke(item)

    def head(self) -> bytes:
        """Return the token for the next step. From here on a judgement is a fact."""
        if self._pronounced is not None:
            return self._pronounced
        token = self.inbox.token
        if self._leads and self.judged:
            self._pronounced = Token(Head.unpack(token), lost=True, life=self.life).pack()
            return self._pronounced
        return Token(Head.unpack(token), quiet=True, life=self.life).pack() if self._quiet else token

    def reaches(self, token: Token) -> bool:
        """Whether this rank has all that ``token`` tells of."""
        if token.lost:
            # Of a rank that nobody has welcomed the events were not wanted; and none come any more.
            done = token == self._last_loss or self.inbox.epoch == NO_EPOCH or self._is_beyond(token)
            return done or self.inbox.have >= token.head.number
        return self.inbox.reaches(token.head) and not (token.quiet and self.unproven)

    def drain(self, token: Token | None, now_s: float) -> list[Event]:
        """Hand over what ``token``, which this rank ``reaches``, tells of; without one, all there is.

        Raises:
            CoordinatorError: the fault, if there is one and no event is left.

        """
        events: list[Event] = []
        if token is None:
            events += self._hand_over(None)
            if self.judged:
                events += self._lose(None, now_s)
            if not self.unproven:
                events += self._release()
        elif not token.lost:
            events += self._hand_over(token.head)
            if token.quiet:
                events += self._release()
        elif self._is_beyond(token):
            self._last_loss = token
        elif token != self._last_loss:
            if self.inbox.have >= token.head.number:
                events += self._hand_over(token.head)
            events += self._lose(token, now_s)
        self.conversation.drained_through = None if token is None else token.pack()
        return events

    def behind(self, token: Token, wait_s: float) -> str:
        """Say that this rank does not reach ``token`` although it waited."""
        if token.quiet and self.inbox.reaches(token.head):
            return (
                f"{self.conversation.standing.name} holds the pages of {self.unreleased} handoffs with a "
                f"coordinator that was lost; rank 0's are quiet, but after {wait_s} s these are not proven "
                f"to be: somebody may still use them; restart this engine"
            )
        return self.conversation.behind(token.head, wait_s)

    # --- the network's side ------------------------------------------------------------------

    def next_message(self, now_s: float) -> Hello | Submit | None:
        """See ``Conversation.next_message``; nothing is said to a coordinator that is lost."""
        return self.conversation.next_message(now_s) if self._pronounced is None else None

    def tick(self, now_s: float) -> None:
        """Judge what did not happen in time."""
        if self._pronounced is None:
            self.conversation.tick(now_s)
            self._judge(now_s)
        if now_s >= self._quiet_at_s:
            self._quiet_at_s = _NEVER
            self._quiet = self.conversation.news = True
            self._flag()

    def due_s(self) -> float:
        """When ``tick`` or ``next_message`` will have something to do, if nothing arrives."""
        if self._pronounced is not None:
            return self._quiet_at_s
        due_s = min(self.conversation.due_s(), self._quiet_at_s)
        if not self.conversation.joined and not self.judged:
            due_s = min(due_s, self._alone_since_s + self._settings.coordinator_lost_s)
        return due_s

    def hear(self, message: ToRank, now_s: float) -> None:
        """See ``Conversation.hear``."""
        if self._pronounced is None:
            self.conversation.hear(message, now_s)
            self._judge(now_s)

    def hear_broadcast(self, broadcast: Broadcast, now_s: float) -> None:
        """See ``Conversation.hear_broadcast``."""
        if self._pronounced is None:
            self.conversation.hear_broadcast(broadcast, now_s)

    def proven(self, now_s: float) -> None:
        """All pages of lost coordinators' handoffs are quiet on this rank."""
        name, lost_s = self.conversation.standing.name, now_s - self._alone_since_s
        logger.info("%s: the pages of %d handoffs are quiet (%.3f s)", name, self.unreleased, lost_s)
        self.unproven = False
        self._await_others(now_s)

    # --- inside ------------------------------------------------------------------------------

    def _judge(self, now_s: float) -> None:
        talk = self.conversation
        if talk.joined:
            self._alone_since_s = now_s
        bound_s = self._settings.coordinator_lost_s
        lost = not talk.joined and talk.standing.fault is None and now_s >= self._alone_since_s + bound_s
        if lost is not self.judged:
            self.judged = lost
            self._flag()
            if lost:
                talk.news = True
                logger.warning("%s: %s; it counts as lost", talk.standing.name, self._sentence)
            else:
                logger.info("%s: the coordinator is back, before anybody has acted", talk.standing.name)

    @property
    def _sentence(self) -> str:
        # The same on every rank.
        bound_s = self._settings.coordinator_lost_s
        return f"the coordinator at {self._address} was not there for {bound_s:g} s"

    def _flag(self) -> None:
        self.flagged = self._quiet or (self._leads and self.judged)

    def _is_beyond(self, token: Token) -> bool:
        """Whether this rank was new, and has joined the others in the life that ``token`` begets already.

        Then the events that the token tells of are none of that life.
        """
        return token.begets(self.life) and not self.conversation.used

    def _hand_over(self, head: Head | None) -> list[Event]:
        first = self.inbox.drained + 1
        return self._ledger.hand_over(first, self.conversation.drain(head))

    def _lose(self, token: Token | None, now_s: float) -> list[Event]:
        """Fail what is in flight, and begin anew."""
        self._last_loss = token
        former, held = self.conversation, self._ledger.former
        failed = self._ledger.give_up(Failure(Reason.COORDINATOR_LOST, "", self._sentence))
        hello = msgspec.structs.replace(former.hello, instance=new_instance(), life=self.life + 1)
        self.conversation = Conversation(hello, self._address, self._settings, now_s, former.standing)
        self.inbox = self.conversation.inbox
        self.judged = False
        self._pronounced = None
        self._alone_since_s = now_s
        if self._ledger.former > held:
            self._quiet = False
            self._quiet_at_s = _NEVER
            if former.inbox.epoch != NO_EPOCH:
                self.unproven = True
                self.demands += 1
            elif not self.unproven:
                # Nobody has ever heard of these pages.
                self._await_others(now_s)
        self._flag()
        logger.error(
            "%s: %s; %d rooms failed, the pages of %d handoffs are held until they are quiet",
            former.standing.name, self._sentence, len(failed), self._ledger.former,
        )  # fmt: skip
        former.standing.become(RankState.CONNECTING)
        return list(failed)

    def _await_others(self, now_s: float) -> None:
        """Our own pages are quiet."""
        self.conversation.news = True
        if self._leads:
            alone = self.conversation.hello.world_size == 1
            self._quiet_at_s = now_s if alone else now_s + QUIET_HOLD_S

    def _release(self) -> list[Event]:
        self._quiet = False
        self._flag()
        return list(self._ledger.release())
