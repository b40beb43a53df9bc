"""What an engine may set on a client."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path  # noqa: TC003 - a dataclass may be asked for its types
from typing import Final

from coordinator.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The bounds of one client (every queue and every wait has one) and its keys.

    Attributes:
        queue_items: how many calls may wait for the coordinator to confirm them.
        queue_bytes: how many bytes of pages and aux these may hold.
        undrained_events: how many events may wait for the engine to drain them; beyond that the
            client takes no more in, and the coordinator keeps them.
        hello_retry_s: how long an unanswered registration waits before it is said again.
        away_after_s: silence after which the coordinator counts as away.
        coordinator_lost_s: how long a rank does without a coordinator before that counts as lost:
            its rooms fail, and it begins anew. Give it more than the coordinator's
            ``rank.lost_after_s`` and ``rank.reattach_s``, and the same on all ranks.
        resend_after_s: how long unconfirmed calls wait before they are submitted again.
        lockstep_wait_s: how long ``drain(through=...)`` waits for events that this rank lacks
            although its group has them; which is so only while it joins late.
        server_key: the coordinator's public CURVE key file, where it demands keys.
        client_key: our own secret key file; its public half must be known to the coordinator.

    """

    queue_items: int = 65536
    queue_bytes: int = 64 << 20
    undrained_events: int = 1 << 20
    hello_retry_s: float = 1.0
    away_after_s: float = 3.0
    coordinator_lost_s: float = 60.0
    resend_after_s: float = 3.0
    lockstep_wait_s: float = 10.0
    server_key: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: naming every bound that is not positive, and a key without the other.

        """
        problems = [
            f"{field.name}: is {getattr(self, field.name)!r}, must be positive"
            for field in fields(self)
            if field.name not in {"server_key", "client_key"} and not getattr(self, field.name) > 0
        ]
        if (self.server_key is None) != (self.client_key is None):
            problems.append("server_key, client_key: only one is given; give both, or none")
        if problems:
            raise ConfigError(problems)


DEFAULTS: Final = ClientSettings()
