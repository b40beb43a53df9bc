"""The background thread of a client: it owns the sockets, and the engine's threads own none.

One lock guards the conversation, which the engine's threads and this thread share; each holds it
for microseconds. Waking the thread costs the engine a system call only when it sleeps; waking the
engine costs this thread one only when the engine has asked for a descriptor to wait on.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

import zmq

from coordinator.client.doorbell import Doorbell
from coordinator.client.prover import Prover
from coordinator.client.sockets import load_keys, open_control, open_outcomes
from coordinator.client.standing import RankState
from coordinator.client.token import Token
from coordinator.errors import ClosedError, ConfigError, NotReadyError, ProtocolError, RefusedError
from coordinator.messages import Bye, decode_broadcast, decode_to_rank, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.client.inbox import Inbox
    from coordinator.client.lives import Lives
    from coordinator.client.proof import Proof
    from coordinator.client.settings import ClientSettings
    from coordinator.messages import Broadcast, Event, Item, Refused, ToRank

#: Messages taken from one socket before the other one and the timers get their turn.
_BATCH: Final = 256
#: Batches of items sent before it is looked what has arrived.
_BATCHES: Final = 16
_MAX_SLEEP_S: Final = 60.0
#: How long what was sent at the end may take to leave; nobody waits for it.
_LINGER_MS: Final = 200
_CLOSE_S: Final = 2.0

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class IoThread:
    """Runs one rank's conversations over sockets of its own.

    Attributes:
        lives: guarded by our lock, except for plain reads of single attributes.
        malformed: how many frames were dropped because they could not be read.

    """

    def __init__(
        self,
        lives: Lives,
        address: str,
        group: str,
        settings: ClientSettings,
        make_proof: Callable[[Callable[[bytes], None]], Proof],
    ) -> None:
        """Start to talk to the coordinator at ``address``.

        ``make_proof`` is given what hears of the endpoint's new addresses (see ``DestinationProof``).

        Raises:
            ConfigError: ZeroMQ cannot use the address, or a key file cannot be read.

        """
        self._keys = load_keys(settings)
        self.lives = lives
        self.malformed = 0
        self._address = address
        self._topic = group.encode() + b"\0"
        self._identity = _new_identity()
        # As a condition it tells the engine's threads of every change.
        self._lock = threading.Condition(threading.Lock())
        self._wake = Doorbell()
        self._bell: Doorbell | None = None
        self._sleeping = False
        self._stopping = False
        # Whose sockets we have: what they bring is for this conversation and no later one.
        self._talk = lives.conversation
        self._opened = (self._talk.outcomes, self._talk.connections)
        self._prover = Prover(lives, make_proof(self.endpoint_moved))
        self._outcomes: zmq.Socket[bytes] | None = None
        try:
            # Opened here, where a bad address can be told; from its start on the thread owns it.
            self._control = open_control(address, self._identity, self._keys)
        except zmq.ZMQError as error:
            self._wake.close()
            problem = (
                f"address: {address!r} cannot be used: {error}; give the coordinator's control "
                f"address, such as ipc:///run/kv-coordinator/control or tcp://host:port"
            )
            raise ConfigError([problem]) from error
        self._poller = zmq.Poller()
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)
        self._thread = threading.Thread(
            target=self._run, name=f"kv-client-{self._talk.standing.name}", daemon=True
        )
        _threads.add(self)
        self._thread.start()

    # --- for the engine's threads ------------------------------------------------------------

    def say(self, item: Item, size_bytes: int, inbox: Inbox) -> None:
        """Queue an item; see ``Lives.say``."""
        with self._lock:
            self.lives.say(item, size_bytes, inbox)
        # Who is not joined has nothing to do with it yet, and will look when it is.
        if self._sleeping and self.lives.conversation.joined:
            self._sleeping = False
            self._wake.ring()

    def head(self) -> bytes:
        """Return the token for the next step; see ``Lives.head``."""
        with self._lock:
            return self.lives.head()

    def drain(self, through: bytes | None, wait_s: float) -> Sequence[Event]:
        """Hand over the events up to the token, or all that arrived.

        Raises:
            NotReadyError: the token is ahead of this rank, and still is after ``wait_s``.
            ProtocolError: ``through`` is no head token.
            CoordinatorError: the conversation's fault.

        """
        token = None if through is None else Token.unpack(through)
        lives, talk = self.lives, self.lives.conversation
        with self._lock:
            if self._bell is not None:
                self._bell.silence()
            if token is not None and not lives.reaches(token):
                self._lock.wait_for(lambda: lives.reaches(token) or talk.standing.fault is not None, wait_s)
                if not lives.reaches(token):
                    talk.standing.check()
                    raise NotReadyError(lives.behind(token, wait_s))
            events = lives.drain(token, time.monotonic())
            if lives.conversation is not talk:
                self._prover.lost()
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
            self.lives.conversation.endpoint_moved(endpoint, time.monotonic())
        self._wake.ring()

    def close(self) -> None:
        """Send what can be sent, say goodbye and end the thread, within ``_CLOSE_S``."""
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
        logger.info("%s is closed; %d calls were not confirmed", name, unconfirmed)
        self._wake.close()
        if self._bell is not None:
            self._bell.close()

    def abandon(self) -> None:
        """In a forked child: the thread and its sockets have stayed with the parent."""
        self._lock = threading.Condition(threading.Lock())
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
            self._control.close(_LINGER_MS)
            if self._outcomes is not None:
                self._outcomes.close(0)
            self._prover.close()

    def _loop(self) -> None:
        standing = self._talk.standing
        while not self._stopping and standing.fault is None:
            with self._lock:
                self.lives.tick(time.monotonic())
                # A judgement is news.
                self._tell_engine()
            if self._prover.work(self._lock):
                with self._lock:
                    self._tell_engine()
            self._follow()
            self._send()
            self._sleep()
            self._receive()
        if standing.fault is None:
            self._send()
            self._transmit(encode(Bye()))

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
        """Open the sockets that the conversation wants."""
        talk = self.lives.conversation
        wanted = (talk.outcomes, talk.connections)
        if talk is self._talk and wanted == self._opened:
            return
        address, connections = wanted
        if talk is not self._talk:
            # Under another name: what is still said to the former one goes nowhere.
            self._talk = talk
            self._identity = _new_identity()
            self._reconnect()
        elif connections != self._opened[1]:
            self._reconnect()
        if self._outcomes is not None:
            self._poller.unregister(self._outcomes)
            self._outcomes.close(0)
            self._outcomes = None
        self._opened = wanted
        if address:
            self._subscribe(address)

    def _reconnect(self) -> None:
        self._poller.unregister(self._control)
        self._control.close(0)
        self._control = open_control(self._address, self._identity, self._keys)
        self._poller.register(self._control, zmq.POLLIN)
        with self._lock:
            self._talk.unblocked()

    def _subscribe(self, address: str) -> None:
        try:
            self._outcomes = open_outcomes(address, self._topic, self._keys)
        except zmq.ZMQError as error:
            message = (
                f"the coordinator at {self._address} has {self._talk.standing.name} subscribe to "
                f"{address!r}, which cannot be used: {error}; correct the address that it advertises"
            )
            with self._lock:
                self._talk.fail(RankState.REFUSED, RefusedError(message))
                self._tell_engine()
            return
        self._poller.register(self._outcomes, zmq.POLLIN)

    def _send(self) -> None:
        """Send what is due; not for ever, however fast the engine speaks."""
        for _ in range(_BATCHES):
            with self._lock:
                mine = self.lives.conversation is self._talk and not self._prover.prepares
                message = self.lives.next_message(time.monotonic()) if mine else None
            if message is None:
                return
            if not self._transmit(encode(message)):
                with self._lock:
                    self._talk.blocked(time.monotonic())
                    self._tell_engine()
                # Wakes us as soon as there is a connection.
                self._poller.modify(self._control, zmq.POLLIN | zmq.POLLOUT)
                return

    def _transmit(self, frame: bytes) -> bool:
        try:
            self._control.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _sleep(self) -> None:
        """Wait for a message, for something to say, or for the time to say it."""
        # From here on a caller wakes us. Whoever came before that has left its item in the outbox.
        self._sleeping = True
        with self._lock:
            mine = self.lives.conversation is self._talk
            due_s = min(self.lives.due_s() if mine else 0.0, self._prover.due_s)
        left_s = 0.0 if self._stopping else min(max(0.0, due_s - time.monotonic()), _MAX_SLEEP_S)
        ready = dict(self._poller.poll(math.ceil(left_s * 1000)))
        self._sleeping = False
        if self._wake.fileno() in ready:
            self._wake.silence()
        if ready.get(self._control, 0) & zmq.POLLOUT:
            self._poller.modify(self._control, zmq.POLLIN)
            with self._lock:
                self._talk.unblocked()

    def _receive(self) -> None:
        """Take what has arrived."""
        broadcasts: list[Broadcast] = []
        messages: list[ToRank] = []
        # Broadcasts first: what the coordinator says to us alone is about a later moment, if any.
        if self._outcomes is not None:
            self._read(self._outcomes, broadcasts, self._as_broadcast)
        self._read(self._control, messages, self._as_message)
        if not broadcasts and not messages:
            return
        now_s = time.monotonic()
        with self._lock:
            if self.lives.conversation is not self._talk:
                return  # It is over.
            for broadcast in broadcasts:
                self.lives.hear_broadcast(broadcast, now_s)
            for message in messages:
                self.lives.hear(message, now_s)
            self._tell_engine()

    def _read(self, socket: zmq.Socket[bytes], into: list[_T], decode: Callable[[list[bytes]], _T]) -> None:
        for _ in range(_BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                into.append(decode(frames))
            except ProtocolError as error:
                self.malformed += 1
                logger.warning(
                    "%s: dropped a frame, %d so far: %s",
                    self._talk.standing.name,
                    self.malformed,
                    error,
                )

    def _as_broadcast(self, frames: list[bytes]) -> Broadcast:
        if len(frames) != 2 or frames[0] != self._topic:  # noqa: PLR2004 - topic and payload
            message = f"a broadcast of {len(frames)} frames for {frames[0][:64]!r}"
            raise ProtocolError(message)
        return decode_broadcast(frames[1])

    def _as_message(self, frames: list[bytes]) -> ToRank:
        if len(frames) != 1:
            message = f"a message of {len(frames)} frames"
            raise ProtocolError(message)
        return decode_to_rank(frames[0])

    def _tell_engine(self) -> None:
        """Wake who waits for a change; the lock is held."""
        self._lock.notify_all()
        if self._bell is not None and self.lives.conversation.news:
            self._bell.ring()


def _new_identity() -> bytes:
    # A routing id must not begin with a zero byte.
    return b"r" + secrets.token_bytes(15)


_threads: weakref.WeakSet[IoThread] = weakref.WeakSet()


def _abandon_all() -> None:
    for thread in list(_threads):
        thread.abandon()


os.register_at_fork(after_in_child=_abandon_all)
