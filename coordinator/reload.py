"""A configuration that is read again while the coordinator runs: all of it is applied, or nothing.

Bounds, limits and the log's level can change, also for handoffs in flight: their clocks move. What is
said to others once (addresses, heartbeats, backends) cannot: it is refused by name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from coordinator import config as configuration
from coordinator import logs
from coordinator.errors import ConfigError
from coordinator.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Protocol

    from pydantic import BaseModel

    from coordinator.config import Config
    from coordinator.rooms import Rooms

    class Reconfigurable(Protocol):
        """What takes a new configuration at once."""

        config: Config
        rooms: Rooms

        def reconfigure(self, config: Config) -> None:
            """Use it from now on."""


#: What can change. Each by its name: a key that is added later can not, until somebody has seen to it.
CHANGEABLE: Final = frozenset(
    {
        "handoff.deadline_s",
        "handoff.hard_cap_s",
        "handoff.stall_s",
        "handoff.offer_ttl_s",
        "peer.connect_s",
        "rank.lost_after_s",
        "release.settle_s",
        "release.drain_s",
        "release.unproven_s",
        "release.quarantine_bytes",
        "limits.max_groups",
        "limits.max_handoffs",
        "limits.max_offers",
        "limits.backlog_events",
        "log.level",
        "shutdown.grace_s",
    }
)
#: Clocks that are moved before the loop gets its turn: a few milliseconds.
SLICE: Final = 1000

_log = get_logger()


class Reload:
    """Reads the configuration's file again when it is called."""

    def __init__(self, path: Path | None, service: Reconfigurable) -> None:
        """Read ``path``; None when the built-in default is used, which has no file."""
        self._path = path
        self._service = service
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self) -> list[str]:
        """Apply what the file says now; returns the keys that have changed.

        Raises:
            ConfigError: it cannot be used, or changes what cannot change. Nothing was applied.

        """
        async with self._one_at_a_time:
            try:
                new = await self._read()
                keys = list(changed(self._service.config, new))
                self._refuse([key for key in keys if key not in CHANGEABLE])
            except ConfigError as error:
                _log.error("config.refused", problems=error.problems)
                raise
            self._service.reconfigure(new)
            logs.set_level(new.log.level)
            _log.warning("config.reloaded", changed=keys)
            await self._move_clocks()
            return keys

    async def _read(self) -> Config:
        if self._path is None:
            raise ConfigError(["this coordinator was started without a file, so there is none to read again"])
        # In a thread: a disk may be slow, and the installed backends are looked up, too.
        return await asyncio.to_thread(configuration.load, self._path)

    def _refuse(self, keys: list[str]) -> None:
        if keys:
            raise ConfigError(
                [f"{self._path}: {key}: cannot change while the coordinator runs; restart it" for key in keys]
            )

    async def _move_clocks(self) -> None:
        """Let what is in flight end when the new bounds say."""
        for number, handoff in enumerate(list(self._service.rooms.past_prefill)):
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            handoff.reschedule()


def changed(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield each key, such as ``handoff.deadline_s``, that two configurations do not agree about."""
    for name in type(old).model_fields:
        ours, theirs = getattr(old, name), getattr(new, name)
        if ours == theirs:
            continue
        if hasattr(ours, "model_fields_set") and hasattr(theirs, "model_fields_set"):
            yield from changed(ours, theirs, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
