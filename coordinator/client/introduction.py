"""How a rank introduces itself: its ``Hello``, checked before it is sent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.errors import PoolError, ProtocolError
from coordinator.layout import Layout
from coordinator.messages import (
    EXTERNAL,
    MAX_NAME,
    VERSION,
    Hello,
    Pool,
    Process,
    Role,
    decode_from_peer,
    encode,
)

if TYPE_CHECKING:
    from coordinator.client.endpoint import Endpoint
    from coordinator.client.pool import KVPool


def introduction(
    role: Role,
    address: str,
    group: str,
    rank: int,
    world_size: int,
    pool: KVPool,
    endpoint: Endpoint | None = None,
) -> Hello:
    """Return the ``Hello`` of a rank that talks to the coordinator at ``address``.

    Raises:
        PoolError: the pool was made for another world size, or is closed.
        ProtocolError: a name or a number is not acceptable.

    """
    if world_size != pool.world_size:
        message = (
            f"world_size is {world_size}, but the pool was allocated for world_size {pool.world_size}: "
            f"its pages have another size; give KVPool.allocate (or wrap) the world_size of the group"
        )
        raise PoolError(message)
    pool.check_open()
    if not 0 <= rank < world_size:
        message = f"rank is {rank}, must be from 0 to world_size - 1, which is {world_size - 1}"
        raise ProtocolError(message)
    pool.check_open()
    needed = pool.layout.pool_bytes(pool.pages, world_size, rank)
    if pool.size_bytes != needed:
        message = (
            f"the pool has {pool.size_bytes} bytes, but {pool.pages} pages of rank {rank} need {needed}: its "
            f"pipeline stage has another number of layers; give KVPool.allocate the rank"
        )
        raise PoolError(message)
    return _checked(
        Hello(
            version=VERSION,
            role=role,
            group=group,
            rank=rank,
            world_size=world_size,
            instance=new_instance(),
            process=_this_process(),
            backend="" if endpoint is None else endpoint.name,
            layout=pool.layout,
            pool=Pool(pool.path, pool.size_bytes, pool.pages, len(pool.regions)),
            endpoint=b"" if endpoint is None else endpoint.address,
            transport=address.partition("://")[0][:16],
        )
    )


def introduction_without_pages(address: str, group: str, rank: int, world_size: int) -> Hello:
    """Return the ``Hello`` of a prefill rank whose engine moves the pages by itself.

    Raises:
        ProtocolError: a name or a number is not acceptable.

    """
    # A page of one byte for each rank: something has to stand there.
    layout = Layout(1, 1, world_size, 1, "uint8", "together")
    return _checked(
        Hello(
            version=VERSION,
            role=Role.PREFILL,
            group=group,
            rank=rank,
            world_size=world_size,
            instance=new_instance(),
            process=_this_process(),
            backend=EXTERNAL,
            layout=layout,
            pool=Pool("", layout.page_bytes(world_size), 1),
            endpoint=b"",
            transport=address.partition("://")[0][:16],
        )
    )


def _checked(hello: Hello) -> Hello:
    """Send it to ourselves: what the coordinator would refuse as malformed is told here and now."""
    try:
        decode_from_peer(encode(hello))
    except (ProtocolError, TypeError, OverflowError) as error:
        message = (
            f"{hello.group!r} rank {hello.rank!r} cannot be introduced: {error}. A group's name has 1 to "
            f"{MAX_NAME} of the characters A-Z a-z 0-9 . _ : -; rank and world_size are plain integers"
        )
        raise ProtocolError(message) from error
    return hello


def new_instance() -> int:
    """Draw what tells one life of a rank from all others."""
    return secrets.randbits(63) | 1


def _this_process() -> Process:
    """Describe this process; where the kernel does not tell, heartbeats alone judge it."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return Process(os.getpid(), "", 0)
    return Process(os.getpid(), boot_id, namespace)
