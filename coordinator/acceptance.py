"""What is wrong with a rank's hello: a sentence for the rank, or None when all is well."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from coordinator.errors import LayoutError
from coordinator.layout import Layout
from coordinator.messages import EXTERNAL, VERSION, Hello, Role
from coordinator.pairing import pairing
from coordinator.worker.settings import is_pool_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.groups import Group


def malformed(hello: Hello, backend: str) -> str | None:
    """Look at the hello by itself; ``backend`` is the one that is used here."""
    if hello.version != VERSION:
        return f"protocol version {hello.version} is not spoken here; this coordinator speaks {VERSION}"
    if hello.rank >= hello.world_size:
        return f"rank {hello.rank} does not exist in a group of world size {hello.world_size}"
    problem = _other_backend(hello, backend)
    if problem is not None:
        return problem
    try:
        hello.layout.check(hello.world_size)
    except LayoutError as error:
        return f"layout: {error}"
    need = hello.layout.pool_bytes(hello.pool.pages, hello.world_size, hello.rank)
    if need != hello.pool.size_bytes:
        return f"pool: {hello.pool.pages} pages of this layout are {need} bytes, not {hello.pool.size_bytes}"
    return None


def unmappable(hello: Hello, hosting: str) -> str | None:
    """See that the rank's memory can be reached in the way that its role and the hosting of workers need."""
    share = hello.layout.share(hello.world_size, hello.rank)
    planes, regions = share.layers * hello.layout.sections[0].planes, hello.pool.regions
    if planes % regions:
        return f"pool: {planes} planes cannot be shared out evenly over {regions} regions"
    if hello.role is Role.DECODE:
        return None if hello.endpoint else "endpoint: a decode rank must say where its memory can be reached"
    if hosting == "coordinator" and hello.backend != EXTERNAL:
        return _bad_pool(hello.pool.path, hello.pool.size_bytes)
    # Whatever memory it is, its worker is where it is.
    return None


def differences(hello: Hello, group: Group) -> list[str]:
    """Compare with the other members of its group; each entry is a field with both values."""
    fields: dict[str, tuple[object, object]] = {
        "role": (group.role, hello.role),
        "world_size": (group.world_size, hello.world_size),
    } | {
        f"layout.{field}": (getattr(group.layout, field), getattr(hello.layout, field))
        for field in Layout.__struct_fields__
    }
    return [f"{name} {ours} != {theirs}" for name, (ours, theirs) in fields.items() if ours != theirs]


def unlike(hello: Hello, group: Group) -> str | None:
    """Say how a rank differs from the other members of its group, if it does."""
    different = differences(hello, group)
    return f"group {group.name} is registered otherwise: {', '.join(different)}" if different else None


def incompatible(hello: Hello, groups: Mapping[str, Group]) -> str | None:
    """Compare with the groups of the other side: one of them at least must fit.

    A group that is known was accepted once, whoever of the other side is there today.
    """
    if hello.group in groups:
        return None
    others = [group for group in groups.values() if group.role is not hello.role and group.live]
    problems = []
    for group in others:
        if hello.role is Role.PREFILL:
            pair = pairing(hello.layout, hello.world_size, group.layout, group.world_size)
        else:
            pair = pairing(group.layout, group.world_size, hello.layout, hello.world_size)
        if not isinstance(pair, str):
            return None
        problems.append(f"does not fit {group.name}: {pair}")
    return "; ".join(problems) or None


def _other_backend(hello: Hello, ours: str) -> str | None:
    """Say that the rank's backend is not ours."""
    if EXTERNAL in {hello.backend, ours} and (hello.role is Role.DECODE or hello.backend != ours):
        return (
            f"backend: this coordinator uses {ours!r}, the {hello.role} rank has {hello.backend!r}; prefill "
            f"engines that move the pages by themselves need one with {EXTERNAL!r}, which is for them alone"
        )
    # A prefill rank whose worker we spawn names none: it has only the memory.
    if hello.backend != ours and (hello.backend or hello.role is Role.DECODE):
        return f"backend: this coordinator uses {ours!r}, the rank has {hello.backend!r}"
    return None


def _bad_pool(path: str, size_bytes: int) -> str | None:
    """Say why a pool file must not be mapped. The worker looks again when it opens it."""
    if not is_pool_path(path):
        return (
            f"pool: {path!r} is no pool file of ours in /dev/shm; use KVPool.allocate, or, for memory that "
            "cannot be shared (a GPU's, a private one, another node's), set backend.hosting = \"rank\""
        )
    try:
        found = os.lstat(path)
    except OSError as error:
        return (
            f"pool: {path} cannot be seen from here ({error.strerror}); containers need one shared /dev/shm"
        )
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return f"pool: {path} is not a regular file of the coordinator's user"
    if found.st_size != size_bytes:
        return f"pool: {path} has {found.st_size} bytes, not {size_bytes}"
    return None
