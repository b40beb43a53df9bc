"""A rank's KV pool: the page memory that handoffs read and write."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Self

from coordinator.client.segment import Segment
from coordinator.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from coordinator.layout import Layout

#: Page and block numbers are int32 on the wire and in the backends.
_MAX_BLOCKS: Final = 2**31 - 1


class KVPool:
    """One contiguous buffer of pages, layer first (see ``coordinator.layout``).

    Make one with ``allocate`` or ``wrap``. It is a context manager.

    Attributes:
        layout: the geometry of the whole engine's cache.
        pages: how many pages it has.
        world_size: ranks in the group that shares the cache.
        address: first byte, as mapped in this process.
        size_bytes: length.
        path: the file in ``/dev/shm`` behind it; empty when no other process can map it.

    """

    def __init__(
        self,
        layout: Layout,
        pages: int,
        world_size: int,
        *,
        tensor: torch.Tensor,
        segment: Segment | None,
        pinned: bool,
        extras: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take what ``allocate`` or ``wrap`` made.

        Args:
            layout: the geometry of the whole engine's cache.
            pages: how many pages ``tensor`` has.
            world_size: ranks in the group that shares the cache.
            tensor: K and V: uint8, shape (planes, pages, page bytes), contiguous.
            segment: the shared file behind it, if any; the pool closes it.
            pinned: it was registered with CUDA, and must be given back.
            extras: the layout's extras, in order, right behind ``tensor``; each uint8, of shape
                (layers, pages, page bytes).

        """
        self.layout = layout
        self.pages = pages
        self.world_size = world_size
        self.address: int = tensor.data_ptr()
        self.size_bytes: int = tensor.nbytes + sum(extra.nbytes for extra in extras)
        self.path = "" if segment is None else segment.path
        self._tensors = (tensor, *extras)
        self._segment = segment
        self._pinned = pinned

    @classmethod
    def allocate(
        cls, layout: Layout, pages: int, world_size: int = 1, *, rank: int = 0, pin: bool | None = None
    ) -> Self:
        """Allocate host memory that a worker process can map; it is zero at first.

        Its file is removed when the pool is closed, when the process ends and when it is killed.

        Args:
            layout: the geometry of the whole engine's cache.
            pages: how many pages; the memory needed is ``layout.pool_bytes(pages, world_size, rank)``.
            world_size: ranks in the rank's group.
            rank: which of them it is; only a layout with pipeline stages asks for it.
            pin: page-lock it for copies from and to a GPU. None: if this process uses CUDA already.

        Raises:
            LayoutError: the layout is impossible.
            PoolError: the pool is empty or too large, there is no such memory, or it cannot be pinned.

        """
        import torch  # noqa: PLC0415 - only who has a pool pays for torch

        layout.check(world_size)
        if not 0 <= rank < world_size:
            message = f"rank is {rank}, must be from 0 to world_size - 1, which is {world_size - 1}"
            raise PoolError(message)
        share = layout.share(world_size, rank)
        planes = share.layers * layout.sections[0].planes
        if not 1 <= pages * planes <= _MAX_BLOCKS:
            message = (
                f"a pool of {pages} pages in {planes} planes: pages x planes must be from 1 to {_MAX_BLOCKS}"
            )
            raise PoolError(message)
        segment = Segment(layout.pool_bytes(pages, world_size, rank))
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        try:
            pinned = _pin(memory, wanted=pin)
        except PoolError:
            segment.close()
            raise
        shapes = [
            (share.layers * section.planes, pages, section.rows * share.heads * section.head_bytes)
            for section in layout.sections
        ]
        ends = list(accumulate(map(math.prod, shapes)))
        tensor, *extras = (
            memory[start:end].view(shape)
            for start, end, shape in zip([0, *ends[:-1]], ends, shapes, strict=True)
        )
        return cls(layout, pages, world_size, tensor=tensor, segment=segment, pinned=pinned, extras=extras)

    @classmethod
    def wrap(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Use memory that only this process has, such as a GPU's.

        Raises:
            PoolError: always, in this version: the worker would have to run inside this process.

        """
        message = (
            f"cannot wrap {len(tensors)} tensors: memory that only this process has needs a worker "
            f"inside it, which this version does not have; use KVPool.allocate"
        )
        raise PoolError(message)

    @property
    def extras(self) -> tuple[torch.Tensor, ...]:
        """The memory of the layout's extras, in order: each uint8, shape (layers, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self.check_open()
        return self._tensors[1:]

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of K and V: uint8, shape (planes, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self.check_open()
        return self._tensors[0]

    def close(self) -> None:
        """Give the memory back; tensors that are still referred to stay valid. Twice is fine."""
        if self._pinned:
            self._pinned = False
            _unpin(self.address)
        self._tensors = ()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def check_open(self) -> None:
        """Refuse a pool that is closed.

        Raises:
            PoolError: it is.

        """
        if not self._tensors:
            message = "the pool is closed"
            raise PoolError(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pin(tensor: torch.Tensor, *, wanted: bool | None) -> bool:
    """Page-lock the memory with CUDA; returns whether that was done."""
    import torch  # noqa: PLC0415 - see above

    # Asking CUDA anything would create a context on a GPU; so by default only one that exists is used.
    if wanted is False or (wanted is None and not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    if not torch.cuda.is_available():
        message = "the pool cannot be pinned: this process has no CUDA device; use pin=False"
        raise PoolError(message)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        message = f"the pool of {tensor.nbytes} bytes cannot be pinned: cudaHostRegister returned {code}"
        raise PoolError(message)
    return True


def _unpin(address: int) -> None:
    import torch  # noqa: PLC0415 - see above

    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
