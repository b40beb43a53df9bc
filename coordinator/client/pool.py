"""A rank's KV pool: the page memory that handoffs read and write."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Self

from backends.base import Region
from coordinator.client.segment import Segment
from coordinator.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from coordinator.layout import Layout, Share

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
        tensors: Sequence[torch.Tensor],
        segment: Segment | None,
        pinned: bool,
        extras: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take what ``allocate`` or ``wrap`` made.

        Args:
            layout: the geometry of the whole engine's cache.
            pages: how many pages the pool has.
            world_size: ranks in the group that shares the cache.
            tensors: K and V, in one piece or several: uint8, each of shape (some planes, pages, page
                bytes), contiguous.
            segment: the shared file behind it, if any; the pool closes it.
            pinned: it was registered with CUDA, and must be given back.
            extras: the layout's extras, in order, right behind ``tensor``; each uint8, of shape
                (layers, pages, page bytes).

        """
        self.layout = layout
        self.pages = pages
        self.world_size = world_size
        self.path = "" if segment is None else segment.path
        self.regions = _regions(tensors, extras, self.path)
        self.size_bytes = sum(region.size_bytes for region in self.regions)
        self._tensors = tuple(tensors)
        self._extras = tuple(extras)
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
        share = _share(layout, world_size, rank)
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
        tensor, *extras = _cut(memory, layout, share, pages)
        return cls(layout, pages, world_size, tensors=[tensor], segment=segment, pinned=pinned, extras=extras)

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
        import torch  # noqa: PLC0415 - see above

        layout.check(world_size)
        share = _share(layout, world_size, rank)
        pages = _pages_in(tensors, layout, layout.pool_bytes(1, world_size, rank), share)
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        if len(flat) == 1:
            tensor, *extras = _cut(flat[0], layout, share, pages)
            views = [tensor]
        else:
            extras, views = [], [memory.view(-1, pages, layout.page_bytes(world_size)) for memory in flat]
        return cls(layout, pages, world_size, tensors=views, segment=None, pinned=False, extras=extras)

    @property
    def extras(self) -> tuple[torch.Tensor, ...]:
        """The memory of the layout's extras, in order: each uint8, shape (layers, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self.check_open()
        return self._extras

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of K and V, where it is in one piece: uint8, shape (planes, pages, page bytes).

        Raises:
            PoolError: the pool is closed, or wraps several tensors.

        """
        if len(self.tensors) > 1:
            message = f"the pool wraps {len(self.tensors)} tensors: use KVPool.tensors"
            raise PoolError(message)
        return self.tensors[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory of K and V, piece by piece: uint8, shape (some planes, pages, page bytes).

        Raises:
            PoolError: the pool is closed.

        """
        self.check_open()
        return self._tensors

    def close(self) -> None:
        """Give the memory back; tensors that are still referred to stay valid. Twice is fine."""
        if self._pinned:
            self._pinned = False
            _unpin(self.regions[0].address)
        self._tensors = self._extras = ()
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


def _share(layout: Layout, world_size: int, rank: int) -> Share:
    """Say what a rank holds.

    Raises:
        PoolError: there is no such rank.

    """
    if not 0 <= rank < world_size:
        message = f"rank is {rank}, must be from 0 to world_size - 1, which is {world_size - 1}"
        raise PoolError(message)
    return layout.share(world_size, rank)


def _cut(memory: torch.Tensor, layout: Layout, share: Share, pages: int) -> list[torch.Tensor]:
    """Cut bytes in one piece into the sections of a pool: K and V, then the extras."""
    shapes = [
        (share.layers * section.planes, pages, section.rows * share.heads * section.head_bytes)
        for section in layout.sections
    ]
    ends = list(accumulate(map(math.prod, shapes)))
    return [
        memory[start:end].view(shape) for start, end, shape in zip([0, *ends[:-1]], ends, shapes, strict=True)
    ]


def _regions(
    tensors: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], path: str
) -> tuple[Region, ...]:
    """Describe the memory to a backend; extras lie right behind their only tensor."""
    behind = sum(extra.nbytes for extra in extras)
    return tuple(
        Region(
            address=tensor.data_ptr(),
            size_bytes=tensor.nbytes + behind,
            memory="cuda" if tensor.device.type == "cuda" else "host",
            device=(tensor.device.index or 0) if tensor.device.type == "cuda" else 0,
            path=path or None,
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
