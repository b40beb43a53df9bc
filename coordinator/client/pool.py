"""A rank's KV pool: the page memory that handoffs read and write."""

from __future__ import annotations

import math
import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Self, TypeVar

import numpy as np

from backends.base import Region
from coordinator.client.segment import Segment
from coordinator.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from coordinator.layout import Layout, Share

_Memory = TypeVar("_Memory", "NDArray[np.uint8]", "torch.Tensor")
#: Page and block numbers are int32 on the wire and in the backends.
_MAX_BLOCKS: Final = 2**31 - 1


class KVPool:
    """Pages, layer first (see ``coordinator.layout``), in one buffer or in several.

    Make one with ``allocate`` or ``wrap``. It is a context manager.

    Attributes:
        layout: the geometry of the whole engine's cache.
        pages: how many pages it has.
        world_size: ranks in the group that shares the cache.
        regions: the buffers, as backends register them; each has the same number of whole planes.
        size_bytes: length of all together.
        path: the file in ``/dev/shm`` behind it; empty when no other process can map it.

    """

    def __init__(
        self,
        layout: Layout,
        pages: int,
        world_size: int,
        *,
        arrays: Sequence[NDArray[np.uint8]] = (),
        segment: Segment | None = None,
        pinned: bool = False,
        tensors: Sequence[torch.Tensor] = (),
        extras: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take what ``allocate`` or ``wrap`` made.

        Args:
            layout: the geometry of the whole engine's cache.
            pages: how many pages the pool has.
            world_size: ranks in the group that shares the cache.
            arrays: of a pool that was allocated: K and V, then the layout's extras, each right behind
                the last; uint8, of shape (planes, pages, page bytes).
            segment: the shared file behind it, if any; the pool closes it.
            pinned: it was registered with CUDA, and must be given back.
            tensors: of a pool that was wrapped: K and V, in one piece or several: uint8, each of shape
                (some planes, pages, page bytes), contiguous.
            extras: of such a pool: the layout's extras, in order, right behind its only tensor; each
                uint8, of shape (layers, pages, page bytes).

        """
        self.layout = layout
        self.pages = pages
        self.world_size = world_size
        self.path = "" if segment is None else segment.path
        self.regions = _regions_of(tensors, extras) if tensors else (_region_of(arrays, self.path),)
        self.size_bytes = sum(region.size_bytes for region in self.regions)
        self._arrays = tuple(arrays)
        self._tensors = tuple(tensors)
        self._extras = tuple(extras)
        self._segment = segment
        self._pinned = pinned
        self._closed = False

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
        layout.check(world_size)
        share = _share(layout, world_size, rank)
        planes = share.layers * layout.sections[0].planes
        if not 1 <= pages * planes <= _MAX_BLOCKS:
            message = (
                f"a pool of {pages} pages in {planes} planes: pages x planes must be from 1 to {_MAX_BLOCKS}"
            )
            raise PoolError(message)
        segment = Segment(layout.pool_bytes(pages, world_size, rank))
        memory = np.frombuffer(segment.memory, np.uint8)
        try:
            pinned = _pin(memory, wanted=pin)
        except PoolError:
            segment.close()
            raise
        arrays = _cut(memory, layout, share, pages)
        return cls(layout, pages, world_size, arrays=arrays, segment=segment, pinned=pinned)

    @classmethod
    def wrap(
        cls, tensors: Sequence[torch.Tensor], layout: Layout, world_size: int = 1, rank: int = 0
    ) -> Self:
        """Use an engine's own KV cache, on the host or on one GPU, as it is.

        No other process can map it. So a prefill rank needs a coordinator with ``backend.hosting =
        "rank"``, and a decode rank a backend that can receive into it (``loopback`` cannot).

        Args:
            tensors: the planes in their order, each tensor with the same number of whole planes and
                contiguous: one for all, one for each layer, or one for each plane. A tensor with
                both planes of a layer has all pages of K first. With extras there is one for all.
            layout: the geometry of the whole engine's cache.
            world_size: ranks in the rank's group.
            rank: which of them it is; only a layout with pipeline stages asks for it.

        Raises:
            LayoutError: the layout is impossible.
            PoolError: the tensors do not fit the layout or each other, or are not contiguous.

        """
        import torch  # noqa: PLC0415 - only who has tensors pays for torch, which takes seconds

        layout.check(world_size)
        share = _share(layout, world_size, rank)
        pages = _pages_in(tensors, layout, layout.pool_bytes(1, world_size, rank), share)
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        if len(flat) == 1:
            tensor, *extras = _cut(flat[0], layout, share, pages)
            views = [tensor]
        else:
            extras, views = [], [memory.view(-1, pages, layout.page_bytes(world_size)) for memory in flat]
        return cls(layout, pages, world_size, tensors=views, extras=extras)

    @property
    def arrays(self) -> tuple[NDArray[np.uint8], ...]:
        """The memory as numpy arrays: what ``tensors`` has, then ``extras``.

        Raises:
            PoolError: the pool is closed, or lies on a GPU.

        """
        self.check_open()
        if not self._arrays:
            if self.regions[0].memory != "host":
                message = f"the pool lies on {self._tensors[0].device}: use KVPool.tensors"
                raise PoolError(message)
            self._arrays = tuple(tensor.numpy() for tensor in (*self._tensors, *self._extras))
        return self._arrays

    @property
    def extras(self) -> tuple[torch.Tensor, ...]:
        """The memory of the layout's extras, in order: each uint8, shape (layers, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self._see_tensors()
        return self._extras

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of K and V, where it is in one piece: uint8, shape (planes, pages, page bytes).

        Raises:
            PoolError: the pool is closed, or wraps several tensors.

        """
        tensors = self.tensors
        if len(tensors) > 1:
            message = f"the pool wraps {len(tensors)} tensors: use KVPool.tensors"
            raise PoolError(message)
        return tensors[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory of K and V, piece by piece: uint8, shape (some planes, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self._see_tensors()
        return self._tensors

    def _see_tensors(self) -> None:
        """See memory that was allocated as tensors, too, once somebody asks for them."""
        self.check_open()
        if not self._tensors:
            import torch  # noqa: PLC0415 - see KVPool.wrap

            tensor, *extras = map(torch.from_numpy, self._arrays)
            self._tensors, self._extras = (tensor,), tuple(extras)

    def close(self) -> None:
        """Give the memory back; tensors and arrays that are still referred to stay valid. Twice is fine."""
        if self._pinned:
            self._pinned = False
            _unpin(self.regions[0].address)
        self._closed = True
        self._arrays, self._tensors, self._extras = (), (), ()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def check_open(self) -> None:
        """Refuse a pool that is closed.

        Raises:
            PoolError: it is.

        """
        if self._closed:
            message = "the pool is closed"
            raise PoolError(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _share(layout: Layout, world_size: int, rank: int) -> Share:
    """Say what a rank holds.

    Raises:
        PoolError: there is no such rank.

    """
    if not 0 <= rank < world_size:
        message = f"rank is {rank}, must be from 0 to world_size - 1, which is {world_size - 1}"
        raise PoolError(message)
    return layout.share(world_size, rank)


def _cut(memory: _Memory, layout: Layout, share: Share, pages: int) -> list[_Memory]:
    """Cut bytes in one piece into the sections of a pool: K and V, then the extras."""
    shapes = [
        (share.layers * section.planes, pages, section.rows * share.heads * section.head_bytes)
        for section in layout.sections
    ]
    ends: list[int] = list(accumulate(map(math.prod, shapes)))
    return [
        memory[start:end].reshape(shape)
        for start, end, shape in zip([0, *ends[:-1]], ends, shapes, strict=True)
    ]


def _region_of(arrays: Sequence[NDArray[np.uint8]], path: str) -> Region:
    """Describe memory of our own to a backend: one buffer."""
    return Region(
        address=arrays[0].ctypes.data,
        size_bytes=sum(array.nbytes for array in arrays),
        memory="host",
        path=path or None,
    )


def _regions_of(tensors: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> tuple[Region, ...]:
    """Describe an engine's memory to a backend; extras lie right behind their only tensor."""
    behind = sum(extra.nbytes for extra in extras)
    return tuple(
        Region(
            address=tensor.data_ptr(),
            size_bytes=tensor.nbytes + behind,
            memory="cuda" if tensor.device.type == "cuda" else "host",
            device=(tensor.device.index or 0) if tensor.device.type == "cuda" else 0,
        )
        for tensor in tensors
    )


def _pages_in(tensors: Sequence[torch.Tensor], layout: Layout, page_bytes: int, share: Share) -> int:
    """Count the pages, each of ``page_bytes`` over all planes and extras, of a pool of these tensors.

    Raises:
        PoolError: they do not fit.

    """
    count, planes = len(tensors), share.layers * layout.sections[0].planes
    problems = []
    if not count or planes % count:
        problems.append(f"{planes} planes cannot be shared out evenly over {count} tensors")
    if layout.extras and count > 1:
        problems.append("a pool with extras must be in one piece")
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1 or any(tensor.device.type not in {"cpu", "cuda"} for tensor in tensors):
        problems.append(f"they are on {', '.join(devices)}; all must be on the host, or on one CUDA device")
    if not all(tensor.is_contiguous() for tensor in tensors):
        problems.append("not all are contiguous: permute the dimensions into the order of the memory first")
    sizes = sorted({tensor.nbytes for tensor in tensors})
    pages, rest = divmod(sum(tensor.nbytes for tensor in tensors), page_bytes)
    if len(sizes) > 1:
        problems.append(f"they differ in size: {sizes} bytes")
    elif not problems and (rest or not pages):
        problems.append(f"{sizes} bytes are no whole number of pages of {page_bytes} bytes in all")
    if pages * planes > _MAX_BLOCKS:
        problems.append(f"{pages} pages x {planes} planes, must be at most {_MAX_BLOCKS}")
    if problems:
        message = f"cannot wrap {count} tensors: {'; '.join(problems)}"
        raise PoolError(message)
    return pages


def _pin(memory: NDArray[np.uint8], *, wanted: bool | None) -> bool:
    """Page-lock the memory with CUDA; returns whether that was done."""
    # Asking CUDA anything would create a context on a GPU; so by default only one that exists is used.
    if not wanted and (wanted is False or "torch" not in sys.modules):
        return False
    import torch  # noqa: PLC0415 - see KVPool.wrap

    if wanted is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    if not torch.cuda.is_available():
        message = "the pool cannot be pinned: this process has no CUDA device; use pin=False"
        raise PoolError(message)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code:
        message = f"the pool of {memory.nbytes} bytes cannot be pinned: cudaHostRegister returned {code}"
        raise PoolError(message)
    return True


def _unpin(address: int) -> None:
    import torch  # noqa: PLC0415 - see KVPool.wrap

    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
