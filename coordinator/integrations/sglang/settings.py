"""What is set by environment variables: SGLang has no place for a plugin's settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from coordinator.client.settings import ClientSettings

if TYPE_CHECKING:
    from collections.abc import Mapping


class PluginSettings(NamedTuple):
    """The plugin's settings.

    Attributes:
        address: ``KV_COORDINATOR``, the coordinator's control address; empty: the plugin does nothing.
        prefix: ``KV_COORDINATOR_GROUP``, how the names of this engine's groups begin.
        client: the client's; ``KV_COORDINATOR_SERVER_KEY`` and ``KV_COORDINATOR_CLIENT_KEY`` are files
            with CURVE keys, needed where the coordinator demands them.

    """

    address: str
    prefix: str
    client: ClientSettings

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the environment.

        Raises:
            ConfigError: only one of the two keys is given.

        """
        keys = [environment.get(f"KV_COORDINATOR_{side}_KEY") for side in ("SERVER", "CLIENT")]
        server_key, client_key = (Path(key) if key else None for key in keys)
        return cls(
            environment.get("KV_COORDINATOR", ""),
            environment.get("KV_COORDINATOR_GROUP", "") or "sglang",
            ClientSettings(server_key=server_key, client_key=client_key),
        )
