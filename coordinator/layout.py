"""The geometry of a KV pool, and whether two of them fit.

A pool of one rank is one contiguous buffer, layer first: ``planes`` planes, each of ``pages``
pages, each page ``page_tokens x heads x head_size`` values of ``dtype``. A plane is the K or the V
of a layer (``kv = "apart"``), or both side by side in one page (``kv = "together"``).

This module does no arithmetic on page lists (the worker's planner does), so that the coordinator
can use it without numpy.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from coordinator.errors import LayoutError

#: Bytes per value, by the names that engines use.
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one engine's KV cache looks like, over all its ranks.

    Attributes:
        layers: transformer layers held by each rank.
        page_tokens: tokens in a page.
        kv_heads: KV heads of the model, over all TP ranks.
        head_size: values per head.
        dtype: a key of ``DTYPE_BYTES``.
        kv: K and V of a layer in planes of their own (``apart``) or in one page (``together``).

    """

    layers: int
    page_tokens: int
    kv_heads: int
    head_size: int
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    kv: Literal["apart", "together"] = "apart"

    def check(self, world_size: int) -> None:
        """Refuse an impossible layout for a group of ``world_size`` ranks.

        Raises:
            LayoutError: naming every field that is wrong, its value and what is accepted.

        """
        problems = [
            f"{field} is {getattr(self, field)}, must be from 1 to 2**20"
            for field in ("layers", "page_tokens", "kv_heads", "head_size")
            if not 1 <= getattr(self, field) <= 2**20
        ]
        if self.dtype not in DTYPE_BYTES:
            problems.append(f"dtype is {self.dtype!r}, must be one of {', '.join(DTYPE_BYTES)}")
        if not problems and self.kv_heads % world_size:
            problems.append(f"kv_heads is {self.kv_heads}, must divide by world_size {world_size}")
        if problems:
            raise LayoutError("; ".join(problems))

    @property
    def planes(self) -> int:
        """Planes in a pool: one per layer, or two when K and V are apart."""
        return self.layers * (2 if self.kv == "apart" else 1)

    def page_bytes(self, world_size: int) -> int:
        """Bytes of one page in one plane of one rank's pool."""
        values = self.page_tokens * (self.kv_heads // world_size) * self.head_size
        return values * DTYPE_BYTES[self.dtype] * (1 if self.kv == "apart" else 2)

    def pool_bytes(self, pages: int, world_size: int) -> int:
        """Bytes of one rank's pool of ``pages`` pages."""
        return self.planes * pages * self.page_bytes(world_size)


def mismatches(prefill: Layout, prefill_world: int, decode: Layout, decode_world: int) -> list[str]:
    """Every field in which the two sides do not fit, with both values; empty when they fit."""
    problems = [
        f"{field}: prefill has {getattr(prefill, field)!r}, decode has {getattr(decode, field)!r}"
        for field in Layout.__struct_fields__
        if getattr(prefill, field) != getattr(decode, field)
    ]
    if prefill_world != decode_world:
        problems.append(
            f"world_size: prefill has {prefill_world}, decode has {decode_world}; "
            "groups of unequal size are not supported"
        )
    return problems


def legs(prefill_world: int, decode_world: int) -> tuple[tuple[int, int], ...]:
    """The (prefill rank, decode rank) pairs between which pages must move.

    Raises:
        LayoutError: the group sizes cannot be paired.

    """
    if prefill_world != decode_world:
        message = f"prefill has {prefill_world} ranks, decode has {decode_world}: must be equal"
        raise LayoutError(message)
    return tuple((rank, rank) for rank in range(prefill_world))
