"""A prefill rank's worker in threads of the rank's own process, for memory that only this process has.

The coordinator says whether it wants that, in ``Welcome``: its ``WorkerOrders`` have the secret by which
it knows the worker, and the backend's settings. The worker is the one of ``coordinator.worker``: a thread
that owns its connection to the coordinator, and one for each peer, which alone call the backend. The
client's I/O thread only tells it what is wanted.

Theory of operation
    A *life* of the worker is one backend with its links, and one connection. It ends when other orders
    come, when the rank's coordinator is lost, when the rank is closed, and when its line breaks, since
    nobody knows then what of the commands and reports got lost. At its end all links are fenced, and
    until that has succeeded there is no next life. So a worker that introduces itself proves by that
    alone that nothing of its former lives moves. A link that cannot be fenced holds all this up, for
    ever if it must be: no page is given back on a guess.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq

from backends import registry
from backends.base import BackendError
from backends.file_locks import unlock
from coordinator import messages
from coordinator.client.doorbell import Doorbell
from coordinator.client.sockets import open_control
from coordinator.errors import CoordinatorError, PoolBusyError, may_pass
from coordinator.messages import WorkerBye, WorkerHello
from coordinator.worker.host import WorkerHost
from coordinator.worker.loop import ControlLoop, End
from coordinator.worker.memory import LOCKS, lock_pool
from coordinator.worker.outbox import Outbox
from coordinator.worker.places import RankPool
from coordinator.worker.settings import Budget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.client.pool import KVPool
    from coordinator.client.sockets import Keys
    from coordinator.messages import Hello, WorkerOrders

#: Pauses between lives that ended by themselves, seconds.
_PAUSES_S: Final = (0.05, 0.2, 1.0, 5.0)
#: A life that was this long was no failure to begin one.
_LONG_LIFE_S: Final = 30.0
#: How soon a thread that could not be had is asked for again.
_START_AGAIN_S: Final = 5.0
#: How long fencing may take before that is worth a line in the log; it is waited for longer.
_FENCE_S: Final = 1.0
_LONGEST_FENCE_S: Final = 60.0
#: How long the last word waits for a line.
_BYE_MS: Final = 1000
#: How long it may take to leave; nobody waits for it.
_LINGER_MS: Final = 500
_MAX_WHY: Final = 4096

logger = logging.getLogger(__name__)


class _UnfencedError(Exception):
    """Something moves, and nothing but the end of this process stops it."""


class _Post(NamedTuple):
    """What is wanted: orders, and for which life of the rank."""

    orders: WorkerOrders
    instance: int


class Hosting:
    """Runs the worker of one prefill rank, or none, as its coordinator wants it.

    ``follow``, ``serves_only``, ``end`` and ``stop`` are for other threads; only ``stop`` waits.
    """

    def __init__(self, pool: KVPool, hello: Hello, address: str, keys: Keys | None) -> None:
        """Run nothing yet.

        Args:
            pool: what is sent from.
            hello: whose pool it is.
            address: of the coordinator.
            keys: CURVE keys, where it demands them.

        """
        self._name = f"{hello.group}/{hello.rank}"
        self._pool = pool
        self._ours = RankPool(pool.layout, pool.world_size, hello.rank, pool.pages, regions=len(pool.regions))
        self._address = address
        self._keys = keys
        self._change = threading.Condition()
        self._bell = Doorbell()
        self._wanted: _Post | None = None
        self._stopping = False
        # The life of the rank for which something may move.
        self._moves_for: int | None = None
        self._crashed = False
        self._thread: threading.Thread | None = None
        self._start_at_s = 0.0

    # --- for other threads -------------------------------------------------------------------

    def follow(self, orders: WorkerOrders | None, instance: int) -> None:
        """Run the worker that these orders describe, for a life of the rank, or none.

        Called again and again: where it could not be begun, that is tried again.
        """
        wanted = None if orders is None else _Post(orders, instance)
        if wanted == self._wanted:
            return
        with self._change:
            if self._stopping or not (self._thread or self._start()):
                return
            self._wanted = wanted
            self._tell()

    def serves_only(self, instance: int) -> bool:
        """Have nothing run for another life of the rank; whether nothing of any other may move."""
        with self._change:
            if self._wanted is not None and self._wanted.instance != instance:
                self._wanted = None
                self._tell()
            return self._moves_for in {None, instance}

    def end(self) -> None:
        """Have nothing run any more, for good."""
        with self._change:
            self._stopping = True
            self._wanted = None
            self._tell()

    def stop(self, timeout_s: float) -> None:
        """End for good, with all links fenced if that can be done in time."""
        self.end()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return  # In the latter case the garbage collector called us.
        thread.join(timeout_s)
        if thread.is_alive():
            logger.error(
                "the worker of %s has not ended within %g s: its pages may still be read",
                self._name,
                timeout_s,
            )

    def _start(self) -> bool:
        """Start the worker's thread; false while the system has none for us, which may pass."""
        now_s = time.monotonic()
        if now_s < self._start_at_s:
            return False
        thread = threading.Thread(target=self._run, name=f"kv-worker-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._start_at_s = now_s + _START_AGAIN_S
            # Where it was raised helps nobody.
            logger.error("the worker of %s cannot run yet: %s", self._name, error)  # noqa: TRY400 - see above
            return False
        self._thread = thread
        return True

    def _tell(self) -> None:
        """Wake the worker's thread, wherever it sleeps; the lock is held."""
        self._change.notify_all()
        self._bell.ring()

    # --- the worker's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (post := self._next()) is not None:
                self._serve(post)
        except Exception:
            # The thread's door. What moves is never called quiet after this.
            logger.exception("the worker of %s has crashed; restart this process", self._name)

    def _next(self) -> _Post | None:
        """Wait for what is wanted; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._stopping or self._wanted is not None)
            return self._wanted

    def _serve(self, post: _Post) -> None:
        """Run one life after the other, as long as this is what is wanted."""
        failures = 0
        while self._is_wanted(post):
            began_s = time.monotonic()
            goes_on = self._live(post)
            failures = 0 if time.monotonic() - began_s > _LONG_LIFE_S else failures + 1
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)] if goes_on else None
            with self._change:
                self._change.wait_for(lambda: self._wanted is not post, pause_s)

    def _is_wanted(self, post: _Post) -> bool:
        with self._change:
            return self._wanted is post

    def _live(self, post: _Post) -> bool:
        """Run one life to its end; whether another one with the same orders makes sense."""
        try:
            line = open_control(self._address, b"w" + secrets.token_bytes(15), self._keys)
        except (OSError, zmq.ZMQError) as error:
            # As when the process is out of descriptors, which passes.
            logger.warning("the worker of %s has no line to %s: %s", self._name, self._address, error)
            return True
        try:
            return self._live_on(line, post)
        finally:
            line.close(_LINGER_MS)

    def _live_on(self, line: zmq.Socket[bytes], post: _Post) -> bool:
        """Run one life over a line of its own."""
        with self._change:
            if self._wanted is not post:
                return False
            self._moves_for = post.instance
        goes_on, last_word = True, ""
        try:
            with ExitStack() as held:
                self._lock(post.instance, held)
                goes_on = self._work(post, line, held)
        except (BackendError, CoordinatorError, OSError, zmq.ZMQError) as error:
            # What had begun to move by then is fenced, else this were an _UnfencedError.
            if isinstance(error, (PoolBusyError, OSError, zmq.ZMQError)) or may_pass(error):
                logger.warning("the worker of %s: %s", self._name, error)
            else:
                logger.error("the worker of %s cannot run: %s", self._name, error)  # noqa: TRY400 - the text says it all
                goes_on, last_word = False, str(error)
        if not last_word and not (goes_on and self._is_wanted(post)):
            last_word = "it was told to end"
        with self._change:
            self._moves_for = None
        if last_word:
            self._say_bye(line, post.orders, last_word)
        return goes_on

    def _lock(self, instance: int, held: ExitStack) -> None:
        """Keep worker processes away from a pool that they could map.

        Raises:
            PoolError: one has it.

        """
        if self._pool.path:
            descriptor = lock_pool(self._pool.path, self._pool.size_bytes, instance)
            held.callback(os.close, descriptor)
            # Explicitly: a forked child would hold it as long as it has the descriptor.
            held.callback(unlock, descriptor, LOCKS)

    def _work(self, post: _Post, line: zmq.Socket[bytes], held: ExitStack) -> bool:
        """Move pages until the end of this life; whether another one makes sense.

        Raises:
            BackendError: the backend cannot be had or started, or refuses the memory.
            CoordinatorError: the pool is not what it should be.

        """
        orders = post.orders
        outbox = Outbox()
        held.callback(outbox.close)
        # In its next life it must not be taken for its predecessor by a peer's engine.
        agent = f"{orders.label}-{secrets.token_hex(4)}"
        backend = registry.load(orders.backend)(agent, orders.options)
        host = WorkerHost(backend, self._ours, Budget(), outbox.put, self._lane_crashed)
        try:
            host.start(self._pool.regions)
        except BaseException:
            # An engine that has started must not keep our memory.
            backend.close()
            raise
        self._crashed = False
        hello = WorkerHello(
            messages.VERSION, orders.token, os.getpid(), backend.capabilities.lands_after_settled
        )
        logger.info("the worker of %s runs, with %s", self._name, orders.backend)
        try:
            with _monitored(line) as monitor:
                loop = ControlLoop(line, hello, host, outbox, orders.heartbeat_s)
                loop.listen(self._bell.fileno(), lambda: self._is_called(post))
                loop.listen(monitor, self._is_cut)
                end = loop.run()
        finally:
            # Whatever has ended it: the lanes go on until they are fenced.
            self._fence(host, held)
        return end is not End.STOPPED

    def _is_called(self, post: _Post) -> bool:
        """Whether this life is to end, as the bell may say."""
        self._bell.silence()
        return self._crashed or not self._is_wanted(post)

    def _is_cut(self) -> bool:
        """The line has broken: nobody knows what of the commands and reports was lost."""
        logger.warning("the worker of %s has lost its line to %s", self._name, self._address)
        return True

    def _lane_crashed(self) -> None:
        """Begin anew: a lane is in an unknown state."""
        logger.error("a lane of the worker of %s has crashed", self._name, exc_info=True)  # noqa: LOG014 - it is called in an except block
        self._crashed = True
        self._bell.ring()

    def _fence(self, host: WorkerHost, held: ExitStack) -> None:
        """Fence all links, however long that takes.

        Raises:
            _UnfencedError: it cannot be done. What moves then moves until the end of this process, and
                what is ``held`` for it is kept as long.

        """
        timeout_s = _FENCE_S
        try:
            while not host.close(timeout_s):
                # Which one it is, and why, its lane and the host have told.
                logger.error(
                    "the worker of %s holds pages: a link is not fenced yet, or a call does not return",
                    self._name,
                )
                timeout_s = min(2 * timeout_s, _LONGEST_FENCE_S)
        except BaseException as error:
            # Whatever it is, nothing is proven: nobody else may have the pool, and the lanes ring on.
            held.pop_all()
            message = f"the pages of {self._name} are held for ever: a link cannot be fenced: {error}"
            raise _UnfencedError(message) from error

    def _say_bye(self, line: zmq.Socket[bytes], orders: WorkerOrders, why: str) -> None:
        """Tell the coordinator that nothing moves, if the line takes it in time."""
        if line.poll(_BYE_MS, zmq.POLLOUT):
            with contextlib.suppress(zmq.Again):
                line.send(messages.encode(WorkerBye(orders.token, why[:_MAX_WHY])), zmq.NOBLOCK)


@contextmanager
def _monitored(line: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
    """Give a socket that is readable once the line has broken."""
    monitor = line.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        yield monitor
    finally:
        line.disable_monitor()
        monitor.close(0)
