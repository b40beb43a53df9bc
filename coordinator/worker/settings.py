"""What a worker process is told when it starts, and how it says why it ended.

The coordinator imports this module, so nothing here may import numpy or a backend.
"""

from __future__ import annotations

import re
import secrets
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from coordinator.errors import ConfigError
from coordinator.layout import Layout
from coordinator.messages import MAX_WORLD, Name, Pool, RankNumber

#: Largest settings document that a worker reads.
MAX_SETTINGS_BYTES: Final = 1 << 20

#: Pools live there, created with ``O_EXCL``; only files of such a name are ever mapped.
POOL_PREFIX: Final = "/dev/shm/kv-coordinator-"  # noqa: S108 - see above
_POOL_PATH: Final = re.compile(re.escape(POOL_PREFIX) + r"[0-9a-f]{16,64}", re.ASCII)

_Positive = Annotated[int, Meta(ge=1, le=2**62)]


class ExitCode(IntEnum):
    """How a worker process ended. The last line on its stderr says why.

    After ``SETTINGS``, ``POOL``, ``BACKEND`` and ``REFUSED`` the same worker would end in the same way again.
    After ``BUSY`` it would not for ever: another worker has the pool, or descriptors or memory were wanting.
    """

    STOPPED = 0
    CRASHED = 1
    SETTINGS = 2
    POOL = 3
    BACKEND = 4
    REFUSED = 5
    BUSY = 6


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a lane hands to its backend at once.

    A move is cut into posts of this size, and the posts of several moves take turns. Small posts
    are fair, large ones are efficient: on one host NIXL needed 8 % more CPU for 256 MiB in posts of
    16 MiB than in one, and 2 % more in posts of 64 MiB. What is in flight is what a short move may
    have to wait for.

    Attributes:
        post_blocks: most blocks in one post.
        post_bytes: most bytes in one post (but always at least one block).
        in_flight_bytes: no new post to a peer while at least this much is moving to it.

    """

    post_blocks: _Positive = 16384
    post_bytes: _Positive = 64 << 20
    in_flight_bytes: _Positive = 128 << 20


class WorkerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a worker process needs to know, as one line of JSON on its stdin.

    Its stdin stays open: when it ends, the worker's parent is gone and the worker ends too.

    Attributes:
        control: the coordinator's control address.
        token: the secret of ``WorkerHello``, as hexadecimal digits.
        label: names the worker in logs and to its engine; no other worker has it.
        backend: name of the backend.
        options: the backend's own settings.
        pool: the KV pool that the worker sends from.
        layout: what that pool looks like.
        world_size: ranks in the group of the pool's owner.
        rank: number of the pool's owner in it.
        instance: which life of the owner it sends for.
        heartbeat_s: an empty report is sent at least this often.
        budget: how much is handed to the backend at once.

    """

    control: Annotated[str, Meta(min_length=1, max_length=4096)]
    token: Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){16,64}\Z")]
    label: Name
    backend: Annotated[str, Meta(min_length=1, max_length=128)]
    options: dict[str, object]
    pool: Pool
    layout: Layout
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD)]
    rank: RankNumber
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]
    instance: Annotated[int, Meta(ge=0)] = 0
    budget: Budget = Budget()


def new_pool_path() -> str:
    """Return a path for a new pool file, which nothing has yet; create it with ``O_EXCL``."""
    return POOL_PREFIX + secrets.token_hex(16)


def is_pool_path(path: str) -> bool:
    """Whether ``path`` is named as a pool file is; says nothing about what is there."""
    return _POOL_PATH.fullmatch(path) is not None


def encode_settings(settings: WorkerSettings) -> bytes:
    """Return the line to write to a worker's stdin, with its end."""
    return msgspec.json.encode(settings) + b"\n"


def decode_settings(line: bytes) -> WorkerSettings:
    """Read what ``encode_settings`` wrote.

    Raises:
        ConfigError: it is not such a line.

    """
    try:
        return msgspec.json.decode(line, type=WorkerSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"worker settings: {error}"]) from error
