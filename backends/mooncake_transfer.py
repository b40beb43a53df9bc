"""A write to a mooncake peer: pieces, each a contiguous run, that its link gives to the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from backends.descriptors import merged_runs
from backends.owned import OwnedTransfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import BackendError, Part, Region, Status
    from backends.descriptors import Runs
    from backends.mooncake_endpoint import RemoteRegion
    from backends.mooncake_link import MooncakeLink

#: An address in this process, one in the peer, and a length in bytes.
Piece: TypeAlias = tuple[int, int, int]

#: Longer runs are cut, so that many connections have work, and what a fence cuts off is short. Measured over
#: loopback: 1 to 16 MiB are equally fast.
_PIECE_BYTES: Final = 1 << 20


class MooncakeTransfer(OwnedTransfer):
    """A write: pieces that wait, and pieces that the engines have."""

    __slots__ = ("_link", "asked", "broken", "in_engine", "pieces", "waiting")

    def __init__(self, link: MooncakeLink, pieces: Iterator[Piece]) -> None:
        """Nothing is posted yet."""
        super().__init__()
        self._link = link
        self.pieces = pieces
        # Whether pieces are left.
        self.waiting = True
        self.in_engine = 0
        # It was polled since the engines were last asked, so it is what they are asked for next time.
        self.asked = True
        # A piece has failed.
        self.broken = False

    @property
    def rest_s(self) -> float:
        """See ``Transfer.rest_s``."""
        return self._link.rest_s

    def poll(self) -> Status:
        """See ``Transfer.poll``."""
        if not self.settled:
            self._link.advance(self)
        return self.status

    def end(self, error: BackendError | None) -> None:
        """See ``OwnedTransfer.end``."""
        super().end(error)
        self.waiting = False


def cut(parts: Sequence[Part], local: Sequence[Region], remote: Sequence[RemoteRegion]) -> Iterator[Piece]:
    """Merge checked parts into runs, now, for the caller's arrays may change later; cut these when asked.

    Args:
        parts: what is to be written.
        local: our regions, by number.
        remote: the peer's.

    """
    return _pieces([(part, merged_runs(part)) for part in parts], local, remote)


def _pieces(
    runs: Sequence[tuple[Part, Runs]], local: Sequence[Region], remote: Sequence[RemoteRegion]
) -> Iterator[Piece]:
    for part, merged in runs:
        source_at = local[part.source.region].address
        destination_at = remote[part.destination.region].address
        for source, destination, size_bytes in zip(*(array.tolist() for array in merged), strict=True):
            source_begin, destination_begin = source_at + source, destination_at + destination
            if size_bytes <= _PIECE_BYTES:
                # By far the most, where there are many.
                yield source_begin, destination_begin, size_bytes
                continue
            for offset in range(0, size_bytes, _PIECE_BYTES):
                length = min(_PIECE_BYTES, size_bytes - offset)
                yield source_begin + offset, destination_begin + offset, length
