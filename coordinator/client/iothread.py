"""The background thread of a client: it owns the sockets, and the engine's threads own none.

One lock guards the conversation, which the engine's threads and this thread share; each holds it
for microseconds. Waking the thread costs the engine a system call only when it sleeps; waking the
engine costs this thread one only when the engine has asked for a descriptor to wait on.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import zmq

from coordinator.client.clock import Clock
from coordinator.client.doorbell import Doorbell
from coordinator.client.lines import Lines
from coordinator.client.prover import Prover
from coordinator.client.sockets import load_keys
from coordinator.client.standing import RankState
from coordinator.client.token import Token
from coordinator.errors import ClosedError, NotReadyError, RefusedError
from coordinator.messages import Bye, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.client.hosting import Hosting
    from coordinator.client.inbox import Inbox
    from coordinator.client.lives import Lives
    from coordinator.client.proof import Proof
    from coordinator.client.settings import ClientSettings
    from coordinator.messages import Broadcast, Event, Item, Refused, ToRank

#: Batches of items sent before it is looked what has arrived.
_BATCHES: Final = 16
_MAX_SLEEP_S: Final = 60.0
_CLOSE_S: Final = 2.0
#: How soon sockets that could not be had are asked for again.
_OPEN_AGAIN_S: Final = 1.0

logger = logging.getLogger(__name__)


class IoThread:
    """Runs one rank's conversations over sockets of its own.

    Attributes:
        lives: guarded by our lock, except for plain reads of single attributes.

    """

    def __init__(
        self,
        lives: Lives,
        address: str,
        group: str,
        settings: ClientSettings,
        make_proof: Callable[[Callable[[bytes], None]], Proof],
        hosting: Hosting | None = None,
    ) -> None:
        """Start to talk to the coordinator at ``address``.

        ``make_proof`` is given what hears of the endpoint's new addresses (see ``DestinationProof``).
        ``hosting`` runs a prefill rank's worker, where the coordinator wants that.

        Raises:
            ConfigError: ZeroMQ cannot use the address, or a key file cannot be read.
            NotReadyError: the process has no descriptors or threads left for it.

        """
        keys = load_keys(settings)
        self.lives = lives
        self._make_lock()
        self._bell: Doorbell | None = None
        self._sleeping = False
        self._stopping = False
        self._open_at_s = 0.0
        self._clock = Clock()
        self._prover = Prover(lives, make_proof(self.endpoint_moved), self._clock)
        self._hosting = hosting
        name = lives.conversation.standing.name
        self._thread = threading.Thread(target=self._run, name=f"kv-client-{name}", daemon=True)
        self._wake = Doorbell()
        with ExitStack() as opened:
            opened.callback(self._wake.close)
            try:
                # Opened here, where a bad address can be told; from its start on the thread owns them.
                self._lines = Lines(lives.conversation, address, group, keys, self._wake.fileno())
                opened.callback(self._lines.close)
                _threads.add(self)
                self._thread.start()
            except (zmq.ZMQError, RuntimeError) as error:
                message = f"{name} cannot be connected now: {error}; raise the limits of this process"
                raise NotReadyError(message) from error
            opened.pop_all()

    # --- for the engine's threads ------------------------------------------------------------

    @property
    def malformed(self) -> int:
        """How many frames were dropped because they could not be read."""
        return self._lines.malformed

    def say(self, item: Item, size_bytes: int, inbox: Inbox) -> None:
        """Queue an item; see ``Lives.say``."""
        with self._mutex:
            self.lives.say(item, size_bytes, inbox)
        # Who is not joined has nothing to do with it yet, and will look when it is.
        if self._sleeping and self.lives.conversation.joined:
            self._sleeping = False
            self._wake.ring()

    def head(self) -> bytes:
        """Return the token for the next step; see ``Lives.head``."""
        with self._mutex:
            return self.lives.head()

    def head_if(self, state: RankState) -> bytes | None:
        """Return the token for the next step if the client is in ``state`` at the same moment."""
        with self._lock:
            return self.lives.head() if self.lives.conversation.standing.state is state else None

    def drain(self, through: bytes | None, wait_s: float) -> Sequence[Event]:
        """Hand over the events up to the token, or all that arrived.

        Raises:
            NotReadyError: the token is ahead of this rank, and still is after ``wait_s``.
            ProtocolError: ``through`` is no head token.
            CoordinatorError: the conversation's fault.

        """
        token = None if through is None else Token.unpack(through)
        lives, standing = self.lives, self.lives.conversation.standing
        with self._lock:
            if self._bell is not None:
                self._bell.silence()
            if token is not None and not lives.reaches(token):
                self._lock.wait_for(lambda: lives.reaches(token) or standing.fault is not None, wait_s)
                if not lives.reaches(token):
                    standing.check()
                    raise NotReadyError(lives.behind(token, wait_s))
            talk, demands = lives.conversation, lives.demands
            events = lives.drain(token, self._clock.now_s())
            if lives.demands != demands:
                self._prover.lost()
            if lives.conversation is not talk:
                self._wake.ring()
            return events or ()

    def take_refusals(self) -> list[Refused]:
        """Hand over the refusals, see ``Conversation``."""
        standing = self.lives.conversation.standing
        with self._lock:
            standing.check()
            taken = list(standing.refusals)
            standing.refusals.clear()
        return taken

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until ``condition``, which is asked under the lock; returns whether it came true."""
        with self._lock:
            return self._lock.wait_for(condition, timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is news; -1 once the client is closed."""
        with self._lock:
            if self._bell is None:
                self._bell = Doorbell()
                self._tell_engine()
            return self._bell.fileno()

    def endpoint_moved(self, endpoint: bytes) -> None:
        """Tell the coordinator where the rank's endpoint is now."""
        with self._lock:
            self.lives.conversation.endpoint_moved(endpoint, self._clock.now_s())
        self._wake.ring()

    def close(self) -> None:
        """Send what can be sent, say goodbye and end the thread, within ``_CLOSE_S``; then the worker."""
        self._stopping = True
        if threading.current_thread() is self._thread:
            return  # The garbage collector called us, perhaps in the middle of anything.
        self._wake.ring()
        self._thread.join(_CLOSE_S)
        talk = self.lives.conversation
        name = talk.standing.name
        with self._lock:
            unconfirmed = len(talk.outbox)
            talk.fail(RankState.CLOSED, ClosedError(f"{name} was closed by its engine"))
            self._tell_engine()
        if self._thread.is_alive():
            logger.error("%s: the I/O thread has not ended within %s s", name, _CLOSE_S)
            return
        if self._hosting is not None:
            self._hosting.stop(_CLOSE_S)
        logger.info("%s is closed; %d calls were not confirmed", name, unconfirmed)
        self._wake.close()
        if self._bell is not None:
            self._bell.close()

    def abandon(self) -> None:
        """In a forked child: the threads and their sockets have stayed with the parent."""
        self._hosting = None
        self._make_lock()
        # What is rung or silenced here would else be so in the parent, which would not know it.
        self._wake = self._wake.renewed()
        self._bell = None if self._bell is None else self._bell.renewed()
        talk = self.lives.conversation
        message = f"{talk.standing.name} was connected before this process was forked: connect anew"
        talk.fail(RankState.CLOSED, ClosedError(message))

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - the thread's door: every later call raises this cause
            self._die(error)
        finally:
            self._lines.close()
            if self._hosting is not None:
                self._hosting.end()
            self._prover.close()

    def _loop(self) -> None:
        standing = self.lives.conversation.standing
        while not self._stopping and standing.fault is None:
            self._hear(*self._lines.receive())
            if self._prover.work(self._lock):
                with self._lock:
                    self._tell_engine()
            self._follow()
            self._sleep(self._speak())
        if standing.fault is None:
            self._speak()
            self._lines.transmit(encode(Bye()))

    def _die(self, error: Exception) -> None:
        talk = self.lives.conversation
        name = talk.standing.name
        logger.error("%s: the I/O thread has died", name, exc_info=error)
        fault = ClosedError(f"the I/O thread of {name} has died of {error!r}; close it and connect anew")
        fault.__cause__ = error
        with self._lock:
            self.lives.conversation.fail(RankState.CLOSED, fault)
            self._tell_engine()

    def _follow(self) -> None:
        """Have the lines that the conversation wants, and the worker that its coordinator wants."""
        talk = self.lives.conversation
        if self._hosting is not None:
            self._hosting.follow(talk.orders, talk.hello.instance)
        if self._clock.now_s() < self._open_at_s:
            return
        try:
            is_new = self._lines.follow(talk)
        except zmq.ZMQError as error:
            self._open_at_s = self._clock.now_s() + _OPEN_AGAIN_S
            logger.warning("%s has no line to its coordinator: %s", talk.standing.name, error)
            return
        except RefusedError as error:
            with self._lock:
                talk.fail(RankState.REFUSED, error)
                self._tell_engine()
            return
        if is_new:
            with self._lock:
                talk.unblocked()

    def _hear(self, broadcasts: Sequence[Broadcast], messages: Sequence[ToRank]) -> None:
        """Take what has arrived, and judge what did not happen in time."""
        lives = self.lives
        still_s = self._clock.turn()
        if still_s:
            logger.warning("%s stood still for %.1f s", lives.conversation.standing.name, still_s)
        now_s = self._clock.now_s()
        with self._mutex:
            had_news = lives.conversation.news
            # What is of a former conversation is over.
            heard = bool(broadcasts or messages) and lives.conversation is self._lines.talk
            if heard:
                for broadcast in broadcasts:
                    lives.hear_broadcast(broadcast, now_s)
                for message in messages:
                    lives.hear(message, now_s)
            lives.tick(now_s)
            if heard or (lives.conversation.news and not had_news):
                self._tell_engine()

    def _speak(self) -> float:
        """Send what is due; returns when there will be more to do."""
        talk = self._lines.talk
        # Not for ever, however fast the engine speaks.
        for _ in range(_BATCHES):
            with self._mutex:
                # Not over the lines of a former conversation, nor before all is prepared for the next.
                may_speak = self.lives.conversation is talk and not self._prover.prepares
                message = self.lives.next_message(self._clock.now_s()) if may_speak else None
                if message is None:
                    # From here on a caller wakes us. Whoever came before has left its item in the outbox.
                    self._sleeping = True
                    return self._due_s()
            if not self._lines.transmit(encode(message)):
                with self._mutex:
                    talk.blocked(self._clock.now_s())
                    self._tell_engine()
        return 0.0

    def _sleep(self, due_s: float) -> None:
        """Wait for a message, for something to say, or for the time to say it."""
        left_s = 0.0 if self._stopping else min(max(0.0, due_s - self._clock.now_s()), _MAX_SLEEP_S)
        self._clock.sleeps(left_s)
        ready = self._lines.wait(left_s)
        self._sleeping = False
        if ready.rang:
            self._wake.silence()
        if ready.writable:
            with self._lock:
                self._lines.talk.unblocked()

    def _due_s(self) -> float:
        """When there will be something to do, if nobody wakes us; the lock is held."""
        if self.lives.conversation is not self._lines.talk:
            return self._open_at_s
        if self._prover.prepares:
            return self._prover.due_s
        return min(self.lives.due_s(), self._prover.due_s)

    def _make_lock(self) -> None:
        # The same lock twice: as a condition it tells the engine's threads of every change. To take it by
        # itself costs half.
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)

    def _tell_engine(self) -> None:
        """Wake who waits for a change; the lock is held."""
        self._lock.notify_all()
        if self._bell is not None and self.lives.conversation.news:
            self._bell.ring()


_threads: weakref.WeakSet[IoThread] = weakref.WeakSet()


def _abandon_all() -> None:
    for thread in list(_threads):
        thread.abandon()


os.register_at_fork(after_in_child=_abandon_all)
