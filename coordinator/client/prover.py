"""Carries out a rank's proof (``coordinator.client.proof``), between the other work of the I/O thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from backends.base import BackendError

if TYPE_CHECKING:
    import threading

    from coordinator.client.clock import Clock
    from coordinator.client.lives import Lives
    from coordinator.client.proof import Proof

#: How soon it is looked again whether pages are quiet: at first, and at most.
_FIRST_LOOK_S: Final = 0.02
_LAST_LOOK_S: Final = 1.0
#: When what failed is tried again.
_RETRY_S: Final = 5.0
#: Pages that are not quiet after this long are worth a line in the log.
_LONG_S: Final = 10.0
_NEVER: Final = float("inf")

logger = logging.getLogger(__name__)


class Prover:
    """Belongs to the I/O thread, but for ``lost``.

    Attributes:
        prepares: what comes before the next introduction is not done: nothing may be said.
        due_s: when ``work`` has something to do.

    """

    def __init__(self, lives: Lives, proof: Proof, clock: Clock) -> None:
        """Nothing is to be proven yet."""
        self.prepares = False
        self.due_s = _NEVER
        self._lives = lives
        self._proof = proof
        self._clock = clock
        self._pause_s = _FIRST_LOOK_S
        self._since_s = 0.0

    def lost(self) -> None:
        """The engine has drained that a coordinator is lost which knew of its pages; the lock is held."""
        self._proof.lost()
        self._pause_s = _FIRST_LOOK_S
        self._since_s = self._clock.now_s()
        self.due_s = 0.0
        self.prepares = True

    def work(self, lock: threading.Condition) -> bool:
        """Get on with it; returns whether pages are proven to be quiet since the last call."""
        done = False
        if self._clock.now_s() >= self.due_s:
            done = self._prepare(lock) and self._look(lock)
        if self._lives.conversation.joined:
            self._proof.welcomed()
        return done

    def _prepare(self, lock: threading.Condition) -> bool:
        """Do what comes before the next introduction, once; returns whether it is done."""
        with lock:
            talk, needed, self.prepares = self._lives.conversation, self.prepares, False
        if not needed:
            return True
        try:
            self._proof.prepare()
        except BackendError as error:
            # The text says it all; where it was raised helps nobody.
            logger.error("%s is not introduced: %s", talk.standing.name, error)  # noqa: TRY400 - see above
            with lock:
                self.prepares = True
                self.due_s = self._clock.now_s() + _RETRY_S
            return False
        # Another coordinator may have been lost meanwhile.
        return not self.prepares

    def close(self) -> None:
        """Give back what is held."""
        self._proof.close()

    def _look(self, lock: threading.Condition) -> bool:
        talk = self._lives.conversation
        quiet = self._proof.holds(talk.hello.instance)
        now_s = self._clock.now_s()
        with lock:
            if quiet and self._lives.conversation is talk:
                self._lives.proven(now_s)
                self.due_s = _NEVER
                return True
            self.due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_LOOK_S)
        if now_s > self._since_s + _LONG_S:
            self._since_s = now_s
            logger.error(
                "%s: the pages of %d handoffs with a lost coordinator are held: somebody may still use them",
                talk.standing.name,
                self._lives.unreleased,
            )
        return False
