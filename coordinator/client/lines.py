"""A client's sockets, and the frames that go over them. All of it belongs to one thread."""

from __future__ import annotations

import logging
import math
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import zmq

from coordinator import frames as wire
from coordinator.client.sockets import open_control, open_outcomes
from coordinator.errors import ConfigError, ProtocolError, RefusedError, may_pass
from coordinator.messages import decode_broadcast, decode_to_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.client.conversation import Conversation
    from coordinator.client.sockets import Keys
    from coordinator.messages import Broadcast, ToRank

#: Messages taken from one socket before the other one and the timers get their turn.
_BATCH: Final = 256
#: How long what was sent at the end may take to leave; nobody waits for it.
_LINGER_MS: Final = 200

# Plain numbers: the operators of pyzmq's flags cost more than the sockets' own work.
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """What ended a wait, beside messages: somebody rang; the connection takes messages again."""

    rang: bool
    writable: bool


class Lines:
    """The connections to a coordinator, as one conversation after the other wants them.

    Attributes:
        talk: the conversation that they are for; what they bring is for no later one.
        malformed: how many frames were dropped because they could not be read.

    """

    def __init__(self, talk: Conversation, address: str, group: str, keys: Keys | None, bell: int) -> None:
        """Connect to ``address``; ``bell`` is a descriptor that ends a wait.

        Raises:
            ConfigError: ZeroMQ cannot use the address.
            ZMQError: there are no sockets to be had.

        """
        self.talk = talk
        self.malformed = 0
        self._address = address
        self._topic = group.encode() + b"\0"
        self._keys = keys
        self._bell = bell
        self._identity = _new_identity()
        self._opened = (talk.outcomes, talk.connections)
        self._outcomes: zmq.Socket[bytes] | None = None
        try:
            self._control = open_control(address, self._identity, keys)
        except zmq.ZMQError as error:
            if may_pass(error):
                raise
            problem = (
                f"address: {address!r} cannot be used: {error}; give the coordinator's control "
                f"address, such as ipc:///run/kv-coordinator/control or tcp://host:port"
            )
            raise ConfigError([problem]) from error
        self._readable: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._poller.register(bell, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)

    def follow(self, talk: Conversation) -> bool:
        """Open the sockets that ``talk`` wants; returns whether its control connection is new.

        Raises:
            RefusedError: the address that it is to subscribe to cannot be used.
            ZMQError: there are no sockets to be had. What is not open yet the next call opens.

        """
        wanted = (talk.outcomes, talk.connections)
        is_next = talk is not self.talk
        if not is_next and wanted == self._opened:
            return False
        reconnects = is_next or talk.connections != self._opened[1]
        if reconnects:
            # Under another name: what is still said to the former one goes nowhere.
            identity = _new_identity() if is_next else self._identity
            control = open_control(self._address, identity, self._keys)
            self._poller.unregister(self._control)
            self._control.close(0)
            self._control, self._identity, self.talk = control, identity, talk
            self._poller.register(self._control, zmq.POLLIN)
        self._subscribe(talk.outcomes)
        self._opened = wanted
        return reconnects

    def transmit(self, frame: bytes) -> bool:
        """Send a frame; if the connection takes none, the next wait ends when it does."""
        try:
            wire.send(self._control, [frame])
        except zmq.Again:
            self._poller.modify(self._control, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    def wait(self, timeout_s: float) -> Ready:
        """Wait for a message, the bell, or a connection that takes messages again."""
        rang = writable = False
        self._readable.clear()
        for source, events in self._poller.poll(math.ceil(timeout_s * 1000)):
            if isinstance(source, zmq.Socket):
                if events & _POLLIN:
                    self._readable.append(source)
                writable = writable or bool(events & _POLLOUT)
            else:
                rang = True
        if writable:
            self._poller.modify(self._control, zmq.POLLIN)
        return Ready(rang, writable)

    def receive(self) -> tuple[list[Broadcast], list[ToRank]]:
        """Take what had arrived when the last wait ended, and what has come since."""
        if not self._readable:
            return [], []
        broadcasts: list[Broadcast] = []
        messages: list[ToRank] = []
        # Broadcasts first: what the coordinator says to us alone is about a later moment, if any.
        if self._outcomes is not None and self._outcomes in self._readable:
            self._read(self._outcomes, broadcasts, self._as_broadcast)
        if self._control in self._readable:
            self._read(self._control, messages, _as_message)
        return broadcasts, messages

    def close(self) -> None:
        """Close the sockets."""
        self._control.close(_LINGER_MS)
        if self._outcomes is not None:
            self._outcomes.close(0)

    def _subscribe(self, address: str) -> None:
        if self._outcomes is not None:
            self._poller.unregister(self._outcomes)
            self._outcomes.close(0)
            self._outcomes = None
        if not address:
            return
        try:
            self._outcomes = open_outcomes(address, self._topic, self._keys)
        except zmq.ZMQError as error:
            if may_pass(error):
                raise
            message = (
                f"the coordinator at {self._address} has {self.talk.standing.name} subscribe to "
                f"{address!r}, which cannot be used: {error}; correct the address that it advertises"
            )
            raise RefusedError(message) from error
        self._poller.register(self._outcomes, zmq.POLLIN)

    def _read(self, socket: zmq.Socket[bytes], into: list[_T], decode: Callable[[list[bytes]], _T]) -> None:
        for _ in range(_BATCH):
            frames = wire.receive(socket)
            if frames is None:
                return
            try:
                into.append(decode(frames))
            except ProtocolError as error:
                self.malformed += 1
                name = self.talk.standing.name
                logger.warning("%s: dropped a frame, %d so far: %s", name, self.malformed, error)
            # Mostly one message has come; to ask is cheaper than to try.
            if not wire.waiting(socket):
                return

    def _as_broadcast(self, frames: list[bytes]) -> Broadcast:
        if len(frames) != 2 or frames[0] != self._topic:  # noqa: PLR2004 - topic and payload
            message = f"a broadcast of {len(frames)} frames for {frames[0][:64]!r}"
            raise ProtocolError(message)
        return decode_broadcast(frames[1])


def _as_message(frames: list[bytes]) -> ToRank:
    if len(frames) != 1:
        message = f"a message of {len(frames)} frames"
        raise ProtocolError(message)
    return decode_to_rank(frames[0])


def _new_identity() -> bytes:
    # A routing id must not begin with a zero byte.
    return b"r" + secrets.token_bytes(15)
