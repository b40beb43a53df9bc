"""Page lists: from what engines have to what the wire carries, checked on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from coordinator.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.integer]


@runtime_checkable
class Tensor(Protocol):
    """What we need of a torch tensor; torch itself is not imported for it."""

    def cpu(self) -> Tensor:
        """Return the tensor in host memory; waits for the GPU when it lives there."""
        ...

    def detach(self) -> Tensor:
        """Return the tensor without its gradient."""
        ...

    def numpy(self) -> Integers:
        """Return the tensor as an array that shares its memory."""
        ...


#: Page numbers, in one dimension: an integer array, an integer tensor, or plain integers.
Pages: TypeAlias = "Sequence[int] | Integers | Tensor"


def pack(pages: Pages, pool_pages: int, *, distinct: bool = False) -> bytes:
    """Pack page numbers as little-endian int32, 4 bytes a page.

    Args:
        pages: page numbers, each from 0 to ``pool_pages - 1``. May be empty.
        pool_pages: how many pages the pool has.
        distinct: refuse a page that is named twice: two writes would race for it.

    Raises:
        PoolError: they are no integers, have more than one dimension, lie outside the pool, or
            name a page twice where that is refused.

    """
    array = pages if isinstance(pages, np.ndarray) else _as_array(pages)
    if array.ndim != 1:
        message = f"pages have the shape {array.shape}, must have one dimension"
        raise PoolError(message)
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        message = f"pages are of dtype {array.dtype}, must be integers"
        raise PoolError(message)
    # Read as unsigned, negative numbers are huge: one pass checks both ends.
    unsigned = array.view(f"u{array.itemsize}") if array.dtype.isnative else array.astype(np.int64)
    if np.maximum.reduce(unsigned) >= pool_pages or not array.dtype.isnative:
        _check_range(array, pool_pages)
    if distinct:
        _check_distinct(array)
    return array.astype("<i4").tobytes()


def _as_array(pages: Sequence[int] | Tensor) -> Integers:
    if isinstance(pages, Tensor):
        return pages.detach().cpu().numpy()
    try:
        return np.array(pages)
    except (ValueError, OverflowError, TypeError) as error:
        message = f"pages are not a list of page numbers: {error}"
        raise PoolError(message) from error


def _check_range(array: Integers, pool_pages: int) -> None:
    outside = array[(array < 0) | (array >= pool_pages)]
    if outside.size:
        message = f"page {outside[0]} is not in the pool, whose pages are 0 to {pool_pages - 1}"
        raise PoolError(message)


def _check_distinct(array: Integers) -> None:
    ordered = np.sort(array)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        message = f"page {twice[0]} is named twice: two writes would land on it"
        raise PoolError(message)
