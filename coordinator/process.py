"""A coordinator as a process: the signals, the service manager, the HTTP, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
from typing import TYPE_CHECKING, Any

import uvloop

from coordinator import garbage, heap, heart, logs, open_files
from coordinator.actions import Actions
from coordinator.errors import ConfigError
from coordinator.logs import get_logger
from coordinator.reload import Reload
from coordinator.service import Service
from coordinator.systemd import Notifier

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.config import Config
    from coordinator.http.server import HttpServer


_log = get_logger()


class Running:
    """A coordinator in its own process: the signals, the service manager, the HTTP, the end."""

    def __init__(self, config: Config, path: Path | None) -> None:
        """Describe it; ``path`` is the file that ``config`` was read from."""
        self._config = config
        self._path = path
        self._asked, self._hurry = asyncio.Event(), asyncio.Event()
        self._notifier = Notifier()
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT; a second signal cuts the grace short. SIGHUP reads the file again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        service = Service(self._config)
        loop.set_exception_handler(lambda _, context: _unhandled(service, context))
        reload = Reload(self._path, service)
        actions = Actions(service.rooms, reload)
        loop.add_signal_handler(signal.SIGHUP, self._reload, reload)
        http: HttpServer | None = None
        try:
            await service.start()
            # Ranks are served meanwhile: what serves operators takes half as long to load as all the rest.
            http = await _http(service, actions)
            if http is not None:
                await http.start()
            garbage.settle()
            service.run_for_ever("the garbage collection", garbage.sweep(lambda: len(service.rooms.active)))
            service.run_for_ever(
                "the watch over the event loop",
                heart.beat(service.counters.loop_lag_s, self._notifier.alive),
            )
            self._notifier.ready()
            await self._asked.wait()
            actions.ending = True
            self._notifier.stopping()
            await service.drain(service.config.shutdown.grace_s, self._hurry)
        finally:
            if http is not None:
                await http.stop()
            await service.stop()

    def _end(self) -> None:
        (self._hurry if self._asked.is_set() else self._asked).set()

    def _reload(self, reload: Reload) -> None:
        task = asyncio.get_running_loop().create_task(_reload(reload))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


def _unhandled(service: Service, context: dict[str, Any]) -> None:
    """Count and log what a callback of the event loop has raised; the loop goes on."""
    service.counters.bugs += 1
    _log.error("coordinator.unhandled", message=context.get("message"), exc_info=context.get("exception"))


async def _reload(reload: Reload) -> None:
    # What it could not use is in the log.
    with contextlib.suppress(ConfigError):
        await reload()


async def _http(service: Service, actions: Actions) -> HttpServer | None:
    """What serves operators; None when that is turned off, and then nothing of it is loaded."""
    if not service.config.http.address:
        return None
    server = await asyncio.to_thread(importlib.import_module, "coordinator.http.server")
    http: HttpServer = server.HttpServer(service.config.http, service.overview, actions)
    return http


def run(config: Config, path: Path | None = None) -> int:
    """Run a coordinator in this process, on uvloop; returns the exit code.

    Raises:
        ConfigError: an address, a key or a file cannot be used.

    """
    heap.settle()
    open_files.allow()
    log = config.log
    file = None if log.file is None else logs.LogFile(log.file, log.file_bytes, log.file_count)
    logs.configure(log.level, log.format, file=file)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Running(config, path).run())
    finally:
        logs.close()
    return 0
