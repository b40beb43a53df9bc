"""Checks on the block lists of a write, and their runs: pure numpy, for all backends.

Every backend calls ``check_parts`` before its engine sees anything. It is what keeps a wrong page
list from touching memory outside a registered region, on either side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.base import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backends.base import BlockIndex, Grid, Part

_INT32: Final = np.dtype(np.int32)
#: An int32 numbers no more; and a negative number, read as unsigned, is beyond each of them.
_MOST_BLOCKS: Final = 1 << 31


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
            or _array_problem("source blocks", part.source_blocks)
            or _array_problem("destination blocks", part.destination_blocks)
            or _pairing_problem(part)
            or _reach_problem("source", part.source_blocks, part.lengths, part.source.count)
            or _reach_problem("destination", part.destination_blocks, part.lengths, part.destination.count)
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
    if (
        grid.offset_bytes < 0
        or not 1 <= grid.count <= _MOST_BLOCKS
        or not 1 <= grid.block_bytes <= grid.stride_bytes
    ):
        return f"{side} grid is impossible: {grid}"
    if grid.end_bytes > region_bytes[grid.region]:
        return (
            f"{side} grid ends at byte {grid.end_bytes}, region {grid.region} has {region_bytes[grid.region]}"
        )
    return None


def _array_problem(what: str, array: object) -> str | None:
    """What is wrong with an array of a part by itself; else ``None``."""
    if not isinstance(array, np.ndarray) or array.dtype != _INT32 or array.ndim != 1:
        return f"{what} must be a numpy array of int32 with one dimension"
    return None


def _pairing_problem(part: Part) -> str | None:
    """Why the arrays, or the two sides, of a part do not fit each other; else ``None``."""
    if part.source_blocks.size != part.destination_blocks.size:
        return f"{part.source_blocks.size} source blocks, {part.destination_blocks.size} destination blocks"
    if part.source.block_bytes != part.destination.block_bytes:
        return (
            f"source blocks have {part.source.block_bytes} bytes, "
            f"destination blocks {part.destination.block_bytes}"
        )
    lengths = part.lengths
    if lengths is None:
        return None
    problem = _array_problem("lengths", lengths)
    if problem is None and lengths.size != part.source_blocks.size:
        problem = f"{part.source_blocks.size} runs, {lengths.size} lengths"
    if problem is None and lengths.size and np.minimum.reduce(lengths) < 1:
        problem = f"a run has {lengths.min()} blocks"
    return problem


def _reach_problem(side: str, blocks: BlockIndex, lengths: BlockIndex | None, count: int) -> str | None:
    """What is wrong with the runs of one side, given the number of blocks of its grid; else ``None``."""
    if not blocks.size:
        return None
    # As unsigned, a negative number is a huge one: one pass finds both.
    first = blocks.view(np.uint32)
    outside = np.maximum.reduce(first) >= count
    if not outside and lengths is not None:
        # Both are less than 2**31, so their sum does not wrap around.
        outside = np.maximum.reduce(first + (lengths.view(np.uint32) - np.uint32(1))) >= count
    if not outside:
        return None
    last = blocks.astype(np.int64) + (0 if lengths is None else lengths - 1)
    return f"{side} blocks reach from {blocks.min()} to {last.max()}, the grid has {count}"


def runs_of(source: BlockIndex, destination: BlockIndex) -> tuple[BlockIndex, BlockIndex, BlockIndex]:
    """Find the blocks that follow one another on both sides.

    Args:
        source: block numbers, int32.
        destination: as many.

    Returns:
        The first blocks of each run, here and there, and its length; all int32.

    """
    if not source.size:
        return source, destination, source
    breaks = source[1:] - source[:-1] != 1
    breaks |= destination[1:] - destination[:-1] != 1
    ends = np.flatnonzero(breaks)
    starts = np.zeros(ends.size + 1, np.int32)
    np.add(ends, 1, out=starts[1:], casting="unsafe")
    lengths = np.empty_like(starts)
    lengths[-1] = source.size - starts[-1]
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    return source[starts], destination[starts], lengths


def all_blocks(part: Part) -> tuple[BlockIndex, BlockIndex]:
    """Every block of a checked part, in its order: of our grid, and of the peer's; both int32."""
    source, destination, lengths = part.source_blocks, part.destination_blocks, part.lengths
    count = part.count
    if lengths is None or count == lengths.size:
        return source, destination
    steps = np.arange(count, dtype=np.int32)
    if lengths.size == 1:
        return source + steps, destination + steps
    begins = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.repeat(source - begins, lengths) + steps, np.repeat(destination - begins, lengths) + steps


def merged_runs(part: Part) -> Runs:
    """Byte runs of a checked part, in its order; without ``lengths`` they are found."""
    block_bytes = part.source.block_bytes
    if part.source.stride_bytes == part.destination.stride_bytes == block_bytes:
        source, destination, lengths = part.source_blocks, part.destination_blocks, part.lengths
        if lengths is None:
            source, destination, lengths = runs_of(source, destination)
        size_bytes = _scaled(lengths, block_bytes)
    else:
        # There is a gap behind each block.
        source, destination = all_blocks(part)
        size_bytes = np.full(source.size, block_bytes, np.int64)
    return Runs(
        _scaled(source, part.source.stride_bytes, part.source.offset_bytes),
        _scaled(destination, part.destination.stride_bytes, part.destination.offset_bytes),
        size_bytes,
    )


@lru_cache(maxsize=256)
def _wide(number: int) -> NDArray[np.int64]:
    """Return a factor that makes int64 of int32 blocks, in an array of one.

    A scalar would be made into such an array for each product, which with short parts, of which a large move
    has thousands, costs as much again as the product does.
    """
    factor = np.array([number], np.int64)
    factor.flags.writeable = False
    return factor


def _scaled(numbers: BlockIndex, factor: int, offset: int = 0) -> NDArray[np.int64]:
    """Return ``numbers * factor + offset``, as int64."""
    if numbers.size == 1:
        # A large move without gaps is thousands of single runs: this is three times cheaper.
        return np.array([numbers.item() * factor + offset])
    scaled = numbers * _wide(factor)
    return scaled + offset if offset else scaled
