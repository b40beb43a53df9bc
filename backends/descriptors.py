"""Checks on the block lists of a write, and their merging into runs: pure numpy, for all backends.

Every backend calls ``check_parts`` before its engine sees anything. It is what keeps a wrong page
list from touching memory outside a registered region, on either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.base import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backends.base import Grid, Part

_INT32: Final = np.dtype(np.int32)
_FIRST: Final = np.zeros(1, np.int64)


class Runs(NamedTuple):
    """Contiguous copies: three int64 arrays of one length.

    Attributes:
        source: byte offsets in the source region.
        destination: byte offsets in the destination region.
        size_bytes: lengths.

    """

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    size_bytes: NDArray[np.int64]


def check_parts(parts: Sequence[Part], local_bytes: Sequence[int], remote_bytes: Sequence[int]) -> int:
    """Refuse a write that is not wholly inside registered memory; return its size in bytes.

    Args:
        parts: what is to be written.
        local_bytes: sizes of our registered regions, by number.
        remote_bytes: sizes of the peer's registered regions, by number.

    Raises:
        InvalidTransferError: naming the part and what is wrong with it.

    """
    size_bytes = 0
    for number, part in enumerate(parts):
        problem = (
            grid_problem("source", part.source, local_bytes)
            or grid_problem("destination", part.destination, remote_bytes)
            or _blocks_problem("source", part.source_blocks, part.source.count)
            or _blocks_problem("destination", part.destination_blocks, part.destination.count)
            or _pairing_problem(part)
        )
        if problem:
            message = f"part {number}: {problem}"
            raise InvalidTransferError(message)
        size_bytes += part.size_bytes
    if not size_bytes:
        message = "the write has no blocks"
        raise InvalidTransferError(message)
    return size_bytes


def grid_problem(side: str, grid: Grid, region_bytes: Sequence[int]) -> str | None:
    """What is wrong with ``grid``, given the sizes of the regions it may lie in; else ``None``."""
    fields = (grid.region, grid.offset_bytes, grid.block_bytes, grid.stride_bytes, grid.count)
    if not all(type(value) is int for value in fields):
        return f"{side} grid has a field that is not an int: {grid}"
    if not 0 <= grid.region < len(region_bytes):
        return f"{side} region {grid.region} is not registered; there are {len(region_bytes)}"
    if grid.offset_bytes < 0 or grid.count < 1 or not 1 <= grid.block_bytes <= grid.stride_bytes:
        return f"{side} grid is impossible: {grid}"
    if grid.end_bytes > region_bytes[grid.region]:
        return (
            f"{side} grid ends at byte {grid.end_bytes}, region {grid.region} has {region_bytes[grid.region]}"
        )
    return None


def _blocks_problem(side: str, blocks: object, count: int) -> str | None:
    """What is wrong with a block list, given the number of blocks of its grid; else ``None``."""
    if not isinstance(blocks, np.ndarray) or blocks.dtype != _INT32 or blocks.ndim != 1:
        return f"{side} blocks must be a numpy array of int32 with one dimension"
    # As unsigned, a negative number is a huge one: one pass finds both.
    if blocks.size and np.maximum.reduce(blocks.view(np.uint32)) >= count:
        return f"{side} blocks reach from {blocks.min()} to {blocks.max()}, the grid has {count}"
    return None


def _pairing_problem(part: Part) -> str | None:
    """Why the two sides of a part do not fit each other; else ``None``."""
    if part.source_blocks.size != part.destination_blocks.size:
        return f"{part.source_blocks.size} source blocks, {part.destination_blocks.size} destination blocks"
    if part.source.block_bytes != part.destination.block_bytes:
        return (
            f"source blocks have {part.source.block_bytes} bytes, "
            f"destination blocks {part.destination.block_bytes}"
        )
    return None


def merged_runs(part: Part) -> Runs:
    """Byte runs of a checked part, in its order; blocks adjacent on both sides are one run."""
    source, destination = part.source_blocks, part.destination_blocks
    block_bytes = part.source.block_bytes
    if not source.size or not part.source.stride_bytes == part.destination.stride_bytes == block_bytes:
        # There is a gap behind each block.
        lengths = np.full(source.size, block_bytes, np.int64)
    else:
        # On block numbers, before they become offsets: that is faster by far where runs are long.
        breaks = source[1:] - source[:-1] != 1
        breaks |= destination[1:] - destination[:-1] != 1
        starts = np.flatnonzero(np.append(True, breaks)) if breaks.any() else _FIRST
        lengths = np.append(starts[1:], source.size)
        lengths -= starts
        lengths *= block_bytes
        source, destination = source[starts], destination[starts]
    return Runs(
        source.astype(np.int64) * part.source.stride_bytes + part.source.offset_bytes,
        destination.astype(np.int64) * part.destination.stride_bytes + part.destination.offset_bytes,
        lengths,
    )
