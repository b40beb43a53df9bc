"""The slow and obvious truth: which byte of which rank's pool is what, from token and head positions alone.

Every value of a model's KV cache has a name: what it is (K, V, the latent, an extra buffer), its layer,
the token's position in the room, its head, and its place in the head. ``Engine`` lists, byte by byte and
in the order of memory, which of them each rank's pool holds, by the words of ``coordinator/layout.py``
and none of its code.
"""

from __future__ import annotations

import itertools
import zlib
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from coordinator.layout import Layout

    Bytes = NDArray[np.uint8]

WIDTHS: Final = {"uint8": 1, "float8_e4m3": 1, "bfloat16": 2, "float32": 4}
#: What stands in a pool where nothing was written.
NOTHING: Final = 0xEE


class Head(NamedTuple):
    """One head of one token in a pool: where it is by the pool's own counting."""

    what: str
    layer: int
    page: int
    slot: int
    head: int
    size_bytes: int


class Engine:
    """An engine of ``world_size`` ranks, each with a pool of ``pages`` pages.

    Attributes:
        pools: the content of each rank's pool.

    """

    def __init__(self, layout: Layout, world_size: int, pages: int) -> None:
        self.layout = layout
        self.world_size = world_size
        self.pages = pages
        self.pools = [np.full(self.size_bytes(rank), NOTHING, np.uint8) for rank in range(world_size)]

    @cached_property
    def memory(self) -> list[list[Head]]:
        """For each rank, the heads in its pool, in the order of memory."""
        return [list(self._heads(rank)) for rank in range(self.world_size)]

    def size_bytes(self, rank: int) -> int:
        return sum(head.size_bytes for head in self.memory[rank])

    def _held(self, rank: int) -> tuple[range, range]:
        """The layers and heads that a rank has."""
        layout = self.layout
        stages = layout.stages or (layout.layers,)
        tp = self.world_size // len(stages)
        before = sum(stages[: rank // tp])
        layers = range(before, before + stages[rank // tp])
        if tp <= layout.kv_heads:
            each = layout.kv_heads // tp
            return layers, range(rank % tp * each, (rank % tp + 1) * each)
        only = rank % tp // (tp // layout.kv_heads)
        return layers, range(only, only + 1)

    def _heads(self, rank: int) -> Iterator[Head]:
        layers, heads = self._held(rank)
        pages, slots = range(self.pages), range(self.layout.page_tokens)
        # In the order of their planes; what shares a plane is listed together.
        planes = {"apart": ["K", "V"], "together": ["KV"], "latent": ["L"]}[self.layout.kv]
        size = self.layout.head_size * WIDTHS[self.layout.dtype]
        kinds = [(layers, planes, size)]
        kinds += [
            (layers, [extra.name], extra.head_size * WIDTHS[extra.dtype]) for extra in self.layout.extras
        ]
        for of_layers, whats, size_bytes in kinds:
            for layer, what, page in itertools.product(of_layers, whats, pages):
                parts = list(what) if what == "KV" else [what]
                if self.layout.order == "tokens":
                    for part, slot, head in itertools.product(parts, slots, heads):
                        yield Head(part, layer, page, slot, head, size_bytes)
                else:
                    for head, part, slot in itertools.product(heads, parts, slots):
                        yield Head(part, layer, page, slot, head, size_bytes)

    def with_room(self, rank: int, room: int, pages: Sequence[int], first: int = 0) -> Bytes:
        """A rank's pool as it must look once pages ``first``, ``first + 1`` ... of the room are there."""
        content = self.pools[rank].copy()
        position = {page: first + number for number, page in enumerate(pages)}
        offset = 0
        for head in self.memory[rank]:
            if head.page in position:
                token = position[head.page] * self.layout.page_tokens + head.slot
                content[offset : offset + head.size_bytes] = value(
                    room, head.what, head.layer, token, head.head, head.size_bytes
                )
            offset += head.size_bytes
        return content


@lru_cache(maxsize=1 << 16)
def value(room: int, what: str, layer: int, token: int, head: int, size_bytes: int) -> Bytes:
    """The bytes of one head of one token: all different, as far as a few bytes can be."""
    seed = zlib.crc32(f"{room}/{what}/{layer}/{token}/{head}".encode())
    return ((seed * 2654435761 + np.arange(size_bytes, dtype=np.uint64) * 40503) >> 7).astype(np.uint8)
