"""What is set in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from coordinator.client.settings import DEFAULTS, ClientSettings
from coordinator.errors import ConfigError

_TEXTS: Final = ("group", "backend", "advertise", "server_key", "client_key")
_KNOWN: Final = {*_TEXTS, "coordinator", "backend_options", "coordinator_lost_s", "queued_s", "one_reporter"}
#: How often decode says of a request that it is still queued.
_QUEUED_S: Final = 10.0


class ConnectorSettings(NamedTuple):
    """The settings of one engine.

    Attributes:
        group: the engine's name at its coordinators; all its ranks have it.
        coordinators: control addresses. A prefill engine has one; a decode engine talks to no others,
            whatever a request says.
        advertise: the address of prefill's coordinator, as decode engines are told.
        backend: what decode receives with; the coordinator says what prefill sends with.
        backend_options: the backend's own settings, of decode.
        queued_s: how often decode says of a request that it is still queued, seconds.
        one_reporter: vLLM is told by one rank alone; see ``executor``.
        client: the clients' bounds and keys.

    """

    group: str
    coordinators: tuple[str, ...]
    advertise: str
    backend: str
    backend_options: dict[str, Any]
    queued_s: float
    one_reporter: bool
    client: ClientSettings

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, sends: bool) -> Self:
        """Read the settings of a prefill engine (``sends``) or a decode engine.

        Raises:
            ConfigError: naming everything that is wrong.

        """
        where = "kv_connector_extra_config."
        problems = [f"{where}{key}: is not known here" for key in sorted(set(extra) - _KNOWN)]
        problems += [
            f"{where}{key}: is {extra[key]!r}, must be a text"
            for key in _TEXTS
            if not isinstance(extra.get(key, ""), str)
        ]
        if not extra.get("group"):
            problems.append(f"{where}group: is missing; name this engine as no other one of its coordinator")
        coordinators = _addresses(extra.get("coordinator"))
        if not coordinators:
            problems.append(f"{where}coordinator: must be a control address, such as tcp://10.0.0.1:7700")
        elif sends and len(coordinators) > 1:
            problems.append(f"{where}coordinator: a prefill engine has one, these are {len(coordinators)}")
        options = extra.get("backend_options", {})
        if not isinstance(options, Mapping):
            problems.append(f"{where}backend_options: is {options!r}, must be an object")
        problems += [
            f"{where}{key}: is {extra[key]!r}, must be a positive number"
            for key in ("coordinator_lost_s", "queued_s")
            if not _is_positive(extra.get(key, 1))
        ]
        if not isinstance(extra.get("one_reporter", False), bool):
            problems.append(f"{where}one_reporter: is {extra['one_reporter']!r}, must be true or false")
        if problems:
            raise ConfigError(problems)
        return cls(
            group=extra["group"],
            coordinators=coordinators,
            advertise=extra.get("advertise") or coordinators[0],
            backend=extra.get("backend") or "nixl",
            backend_options=dict(options),
            queued_s=float(extra.get("queued_s", _QUEUED_S)),
            one_reporter=extra.get("one_reporter", False),
            client=_client(extra),
        )


def _addresses(value: object) -> tuple[str, ...]:
    """Return the addresses of a text or a list of texts; none when it is something else."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(address, str) and address for address in found):
        return ()
    return tuple(found)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _client(extra: Mapping[str, Any]) -> ClientSettings:
    """Return the settings of the clients.

    Raises:
        ConfigError: one of the two keys is missing.

    """
    server_key, client_key = (
        Path(key) if key else None for key in (extra.get("server_key"), extra.get("client_key"))
    )
    lost_s = float(extra.get("coordinator_lost_s", DEFAULTS.coordinator_lost_s))
    return ClientSettings(server_key=server_key, client_key=client_key, coordinator_lost_s=lost_s)
