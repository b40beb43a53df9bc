"""A rank's KV pool without torch, so that many rank processes start fast and stay small."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

from coordinator.client import KVPool, Layout
from coordinator.client.segment import Segment

if TYPE_CHECKING:
    import mmap

    import torch

_HEAD_VALUES: Final = 64


class HostMemory:
    """Shared memory, as far as a ``KVPool`` looks at its tensor."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Hold on to ``memory``."""
        self._bytes = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        self.nbytes = len(memory)
        self.device = SimpleNamespace(type="cpu")

    def data_ptr(self) -> int:
        """Address of the first byte."""
        return ctypes.addressof(self._bytes)


def tiny_layout(world_size: int) -> Layout:
    """Lay out pages of 128 bytes in one plane, however many ranks there are."""
    return Layout(
        layers=1, page_tokens=1, kv_heads=world_size, head_size=_HEAD_VALUES, dtype="uint8", kv="together"
    )


def lean_pool(layout: Layout, pages: int, world_size: int) -> KVPool:
    """Allocate a pool in ``/dev/shm``, as ``KVPool.allocate`` does, but without torch.

    Raises:
        PoolError: there is not that much shared memory.

    """
    segment = Segment(layout.pool_bytes(pages, world_size))
    tensor = cast("torch.Tensor", HostMemory(segment.memory))
    return KVPool(layout, pages, world_size, tensors=[tensor], segment=segment, pinned=False)
