"""How large pages and pools are, for a replay to fit into the memory that there is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from backends.memory import SHM_DIRECTORY
from coordinator.layout import DTYPE_BYTES
from coordinator.replay.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.layout import Layout
    from coordinator.replay.trace import Prompt

#: A pool has room for so many of the longest prompt.
_LONGEST: Final = 8
_FEWEST_PAGES: Final = 64
#: All pools together: at most so many bytes, and at most this part of the shared memory that is free.
_BUDGET_BYTES: Final = 512 << 20
_FREE_PART: Final = 0.5
#: Heads of so many bytes are written and checked word by word, which is fastest.
_WORD_BYTES: Final = 8


def pool_pages(prompts: Sequence[Prompt], layout: Layout) -> int:
    """Choose how many pages each pool has: several of the longest prompts fit into it."""
    longest = max(prompt.input_tokens for prompt in prompts)
    return max(_FEWEST_PAGES, _LONGEST * -(-longest // layout.page_tokens))


def page_bytes(layout: Layout, world_size: int) -> int:
    """Bytes of a page, over all ranks of an engine."""
    return sum(layout.pool_bytes(1, world_size, rank) for rank in range(world_size))


def fitting_bytes(pages: int, engines: int) -> int:
    """How large a page may be for the pools of so many engines to fit.

    Raises:
        ReplayError: there is no shared memory at all.

    """
    found = os.statvfs(SHM_DIRECTORY)
    free_bytes = found.f_bavail * found.f_frsize
    fitting = int(min(_BUDGET_BYTES, free_bytes * _FREE_PART)) // (pages * engines)
    if fitting < 1:
        message = f"{SHM_DIRECTORY} has {free_bytes} bytes free: too few for {engines} pools of {pages} pages"
        raise ReplayError(message)
    return fitting


def scaled(layout: Layout, limit_bytes: int, world_sizes: Sequence[int]) -> Layout:
    """Cut a layout until a page takes ``limit_bytes`` at most in each engine; unchanged when it does already.

    Tokens in a page, heads and kind stay, for they decide how many pages and legs there are. Layers go first,
    then values of a head; stages and extra buffers are left out.

    Raises:
        ReplayError: it cannot be cut that much.

    """

    def taken(candidate: Layout) -> int:
        return max(page_bytes(candidate, world_size) for world_size in world_sizes)

    if taken(layout) <= limit_bytes:
        return layout
    single = msgspec.structs.replace(layout, layers=1, stages=(), extras=())
    if taken(single) <= limit_bytes:
        return msgspec.structs.replace(single, layers=min(layout.layers, limit_bytes // taken(single)))
    value = msgspec.structs.replace(single, head_size=1)
    if taken(value) > limit_bytes:
        message = f"a page of this layout takes {taken(value)} bytes at least; {limit_bytes} are too few"
        raise ReplayError(message)
    values = limit_bytes // taken(value)
    word = max(1, _WORD_BYTES // DTYPE_BYTES[layout.dtype])
    return msgspec.structs.replace(single, head_size=values // word * word or values)
