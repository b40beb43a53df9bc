"""The settings of a coordinator: what can be set, what is accepted, and what goes together.

A configuration is a TOML file, read once at start. Every mistake in it is reported at once, each as
``file: key: what is wrong and what is accepted``; nothing is guessed and nothing is defaulted after
a mistake. ``Config()`` is the built-in default; ``configs/local.toml`` says the same in TOML.

Each field's description completes the sentence "must be ...".
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from coordinator import config_conflicts
from coordinator.config_problems import Problem, explain, without
from coordinator.errors import ConfigError
from coordinator.messages import MAX_FRAME_BYTES

#: Largest configuration file that is read.
MAX_FILE_BYTES: Final = 1 << 20
#: So many tables and lists in each other are more than any setting needs.
MAX_DEPTH: Final = 32

#: A bound. NaN and infinity are refused: without a bound, nothing would be bounded.
Seconds = Annotated[
    float,
    Field(
        gt=0,
        le=604_800,
        allow_inf_nan=False,
        description="a number of seconds over 0, at most 604800 (a week)",
    ),
]
#: A pause that may be left out.
Pause = Annotated[
    float, Field(ge=0, le=3600, allow_inf_nan=False, description="a number of seconds from 0 to 3600")
]
Bytes = Annotated[int, Field(ge=1, le=2**62, description="a whole number of bytes, at least 1")]
Number = Annotated[int, Field(ge=1, le=10_000_000, description="a whole number from 1 to 10000000")]
Address = Annotated[
    str, Field(min_length=1, max_length=255, description="an address like ipc:///run/x or tcp://host:port")
]
Addresses = Annotated[
    tuple[Address, ...],
    Field(min_length=1, max_length=16, strict=False, description="a list of one to 16 addresses in quotes"),
]
Name = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9._:-]+$",
        description="a name in quotes, of 1 to 128 letters, digits and . _ : -",
    ),
]


def _nameable(path: Path) -> Path:
    """Refuse what the system's calls refuse by an error that is not one of a file."""
    if "\0" in str(path):
        raise ValueError
    return path


#: A path that a file can have.
FilePath = Annotated[
    Path, Field(strict=False, description="the path of a file, in quotes"), AfterValidator(_nameable)
]


class Section(BaseModel):
    """A table of the file: unknown keys are refused, types are exact, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Service(Section):
    """``[service]``: which coordinator this is."""

    name: Name = "kv-coordinator"


class Listen(Section):
    """``[listen]``: where ranks and workers find the coordinator.

    Attributes:
        control: registrations and handoffs; the first one is what spawned workers use.
        outcomes: the broadcast; at least one for each transport that ``control`` uses.
        advertise: the host name or address under which other nodes reach this one.

    """

    control: Addresses = ("ipc:///run/kv-coordinator/control",)
    outcomes: Addresses = ("ipc:///run/kv-coordinator/outcomes",)
    advertise: Annotated[
        str,
        Field(
            max_length=253, pattern=r"^[A-Za-z0-9.:_-]*$", description="a host name or address, without port"
        ),
    ] = ""


class Backend(Section):
    """``[backend]``: what moves the bytes.

    Attributes:
        name: a backend that is installed.
        hosting: who runs the worker: a process that the ``coordinator`` spawns, or the ``rank`` itself.
        options: per backend name, that backend's own settings; the backend checks them.

    """

    name: Annotated[
        str, Field(min_length=1, max_length=128, description="the name of a backend, in quotes")
    ] = "loopback"
    hosting: Annotated[Literal["coordinator", "rank"], Field(description='"coordinator" or "rank"')] = (
        "coordinator"
    )
    options: Annotated[
        dict[str, dict[str, object]], Field(description="one table for each backend, [backend.options.NAME]")
    ] = {}

    @property
    def chosen_options(self) -> dict[str, object]:
        """The options of the backend that is used."""
        return self.options.get(self.name, {})


class HandoffBounds(Section):
    """``[handoff]``: how long a handoff may wait for what is still missing."""

    deadline_s: Seconds = 300.0
    hard_cap_s: Seconds = 1800.0
    stall_s: Seconds = 60.0
    offer_ttl_s: Seconds = 600.0


class PeerBounds(Section):
    """``[peer]``: decode ranks."""

    connect_s: Seconds = 60.0


class RankBounds(Section):
    """``[rank]``: signs of life."""

    heartbeat_s: Annotated[
        float,
        Field(ge=0.01, le=3600, allow_inf_nan=False, description="a number of seconds from 0.01 to 3600"),
    ] = 1.0
    lost_after_s: Seconds = 15.0
    reattach_s: Seconds = 10.0

    @property
    def break_s(self) -> float:
        """A rank that was silent for longer may have been stopped meanwhile."""
        return 2 * self.heartbeat_s


class ReleaseBounds(Section):
    """``[release]``: when the pages of a failed handoff are quiet.

    ``quarantine_bytes`` left out means a tenth of the pools that are sent from. ``unproven_s`` is for
    engines that move the pages by themselves; left out, their pages are held until they are proven quiet.
    """

    settle_s: Pause = 5.0
    drain_s: Pause = 2.0
    unproven_s: Annotated[
        Seconds | None,
        Field(description="a number of seconds over 0, at most 604800 (a week); left out: never"),
    ] = None
    quarantine_bytes: Annotated[
        Bytes | None, Field(description="a whole number of bytes, at least 1; left out: a tenth of the pools")
    ] = None


class Limits(Section):
    """``[limits]``: how much the coordinator holds at most."""

    max_frame_bytes: Annotated[
        int,
        # Not less than what clients are made to send.
        Field(
            ge=MAX_FRAME_BYTES, le=1 << 30, description="a whole number of bytes from 8388608 to 1073741824"
        ),
    ] = MAX_FRAME_BYTES
    max_groups: Number = 256
    max_handoffs: Number = 200_000
    max_offers: Number = 100_000
    backlog_events: Number = 200_000


class Http(Section):
    """``[http]``: metrics, health, and what operators see and do.

    Attributes:
        address: where it is served; empty: not at all.
        token: the secret that calls which change something must carry.
        token_file: a file that holds the token instead, readable by the coordinator's user and group alone.

    """

    address: Annotated[
        str,
        Field(
            max_length=255,
            pattern=r"^$|^(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$",
            description='"host:port", or "" for no HTTP at all',
        ),
    ] = "127.0.0.1:7780"
    token: Annotated[
        str,
        Field(pattern=r"^$|^[!-~]{16,512}$", description="a secret in quotes, of 16 to 512 ASCII characters"),
    ] = ""
    token_file: Annotated[FilePath | None, Field(description="the path of a file, in quotes")] = None


class Log(Section):
    """``[log]``: the log on stdout, and in a file if one is named.

    Attributes:
        file: written beside stdout, one JSON object a line.
        file_bytes: at this size it is set aside as ``FILE.1``, and a new one is begun.
        file_count: how many files are kept, that one included.

    """

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description='"debug", "info", "warning" or "error"'),
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "console"], Field(description='"auto", "json" or "console"')
    ] = "auto"
    file: Annotated[FilePath | None, Field(description="the path of a file, in quotes")] = None
    file_bytes: Annotated[
        int, Field(ge=65536, le=1 << 40, description="a whole number of bytes, at least 65536")
    ] = 64 << 20
    file_count: Annotated[int, Field(ge=1, le=1000, description="a whole number from 1 to 1000")] = 5


class Shutdown(Section):
    """``[shutdown]``: the end."""

    grace_s: Pause = 30.0


class Security(Section):
    """``[security]``: CURVE keys; needed as soon as an address is not on this host.

    Attributes:
        server_key: the coordinator's secret key file, readable by its user alone.
        client_keys: a directory with the public key file of every client that may connect.

    """

    server_key: Annotated[FilePath, Field(description="the path of a key file, in quotes")]
    client_keys: Annotated[FilePath, Field(description="the path of a directory, in quotes")]


class Config(Section):
    """All settings. Frozen; passed in where it is needed, never looked up."""

    service: Service = Service()
    listen: Listen = Listen()
    backend: Backend = Backend()
    handoff: HandoffBounds = HandoffBounds()
    peer: PeerBounds = PeerBounds()
    rank: RankBounds = RankBounds()
    release: ReleaseBounds = ReleaseBounds()
    limits: Limits = Limits()
    http: Http = Http()
    log: Log = Log()
    shutdown: Shutdown = Shutdown()
    security: Security | None = None


def load(path: str | Path) -> Config:
    """Read a configuration file.

    Raises:
        ConfigError: it cannot be read or used; every mistake is one line.

    """
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError([f"{name}: is larger than {MAX_FILE_BYTES} bytes; is it a configuration file?"])
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError([f"{name}: is not UTF-8 text: {error}"]) from error
    return parse(text, name)


def parse(text: str, name: str = "configuration") -> Config:
    """Read a configuration from TOML text; ``name`` is what its mistakes are reported under.

    Raises:
        ConfigError: it cannot be used; every mistake is one line.

    """
    try:
        data = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError([f"{name}: is nested too deeply"]) from error
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise ConfigError([f"{name}: is not TOML: {error}"]) from error
    if _depth_is_over(data, MAX_DEPTH):
        raise ConfigError(
            [f"{name}: is nested too deeply: more than {MAX_DEPTH} tables and lists in each other"]
        )
    problems: list[Problem] = []
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems = explain(error, Config)
        # What is left must be good, so that combinations of the good keys are judged as well.
        config = Config.model_validate(without(data, problems))
    spoiled = {key for problem in problems for key in problem.involved}
    problems += [problem for problem in config_conflicts.find(config) if not problem.touches(spoiled)]
    if problems:
        raise ConfigError([f"{name}: {problem.line}" for problem in problems])
    return config


def _depth_is_over(data: dict[str, Any], bound: int) -> bool:
    """Whether tables and lists are nested more deeply, however much more: what comes later calls itself."""
    level: list[Any] = [data]
    for _ in range(bound):
        tables = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for table in tables for value in table if isinstance(value, (dict, list))]
    return bool(level)
