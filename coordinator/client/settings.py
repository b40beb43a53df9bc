"""What an engine may tune on a client, and what the coordinator's absence means to it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from coordinator.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Bounds of one client. Every queue and every wait has one.

    Attributes:
        queue_items: how many calls may wait for the coordinator to confirm them.
        queue_bytes: how many bytes of pages and aux these may hold.
        undrained_events: how many events may wait for the engine to drain them; beyond that the
            client takes no more in, and the coordinator keeps them.
        hello_retry_s: how long an unanswered registration waits before it is said again.
        away_after_s: silence after which the coordinator counts as away.
        resend_after_s: how long unconfirmed calls wait before they are submitted again.
        lockstep_wait_s: how long ``drain(through=...)`` waits for events that this rank lacks
            although its group has them; which is so only while it joins late.

    """

    queue_items: int = 65536
    queue_bytes: int = 64 << 20
    undrained_events: int = 1 << 20
    hello_retry_s: float = 1.0
    away_after_s: float = 3.0
    resend_after_s: float = 3.0
    lockstep_wait_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: naming every setting that is not positive.

        """
        problems = [
            f"{field.name}: is {getattr(self, field.name)!r}, must be positive"
            for field in fields(self)
            if not getattr(self, field.name) > 0
        ]
        if problems:
            raise ConfigError(problems)


DEFAULTS: Final = ClientSettings()
