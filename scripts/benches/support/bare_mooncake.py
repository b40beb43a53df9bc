"""Bare Mooncake: runs merged, cut to some MiB, submitted many at a time, polled.

Its synchronous batches were tried too: they spin on a core that the receiver needs, and over loopback
they reached half of this with merged pages, and as much with scattered ones.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from backends.mooncake import Options
from backends.mooncake_engine import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from scripts.benches.support.bare import Memory

#: Pieces that the engine has at a time: more is not faster, and above some 2,000 it refuses.
_DEPTH: Final = 64
#: Longer runs are cut, so that all its connections have work.
_PIECE_BYTES: Final = 1 << 20


class Engine:
    """A native engine, whose pool is registered."""

    def __init__(self, options: Mapping[str, object], memory: Memory) -> None:
        """Start it.

        Raises:
            RuntimeError: it does not work on this host.

        """
        settings = msgspec.convert(dict(options), Options)
        module: Any = load_engine(settings.environment())
        self.native = module.TransferEngine()
        if self.native.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device) != 0:
            message = "Mooncake's engine cannot be set up; its own messages are on stderr"
            raise RuntimeError(message)
        if self.native.register_memory(memory.address, memory.size_bytes) != 0:
            message = "Mooncake's engine does not register the pool"
            raise RuntimeError(message)
        self.name = f"{settings.host}:{self.native.get_rpc_port()}"


class Receiver:
    """Memory that others write into."""

    def __init__(self, options: Mapping[str, object], memory: Memory) -> None:
        """Register it."""
        self._engine: Engine | None = Engine(options, memory)
        self.address = msgspec.msgpack.encode((self._engine.name, memory.address))

    def close(self) -> None:
        """Give the memory back."""
        self._engine = None


class Transfer:
    """The pages of one handoff: ``pieces`` wait, ``moving`` ones are in the engine."""

    def __init__(self, pieces: Iterator[tuple[int, int, int]]) -> None:
        """Nothing is submitted yet; a piece is source, destination and length."""
        self.pieces = pieces
        self.waiting = True
        self.moving = 0


class Sender:
    """Writes into one receiver."""

    def __init__(self, options: Mapping[str, object], memory: Memory, address: bytes) -> None:
        """Register the memory."""
        self._peer, self._remote_address = msgspec.msgpack.decode(address)
        self._engine: Engine | None = Engine(options, memory)
        self._memory = memory
        self._queue: deque[Transfer] = deque()
        self._moving: dict[int, Transfer] = {}

    def post(self, source_pages: NDArray[np.int32], destination_pages: NDArray[np.int32]) -> Transfer:
        """Start to write pages."""
        transfer = Transfer(self._pieces(source_pages, destination_pages))
        self._queue.append(transfer)
        self._feed()
        return transfer

    def done(self, transfer: Transfer) -> bool:
        """Whether all of it has arrived.

        Raises:
            RuntimeError: a write failed.

        """
        native = self._native
        ended = [
            (number, status) for number in self._moving if (status := native.transfer_check_status(number))
        ]
        for number, status in ended:
            self._moving.pop(number).moving -= 1
            if status < 0:
                message = "a bare write failed; the engine's messages are on stderr"
                raise RuntimeError(message)
        if ended:
            self._feed()
        return not transfer.waiting and not transfer.moving

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        self._engine = None

    @property
    def _native(self) -> Any:  # noqa: ANN401 - the native module has no types
        if self._engine is None:
            message = "the sender is closed"
            raise RuntimeError(message)
        return self._engine.native

    def _feed(self) -> None:
        """Submit pieces of the transfers in turn, up to the depth."""
        while self._queue and len(self._moving) < _DEPTH:
            transfer = self._queue.popleft()
            piece = next(transfer.pieces, None)
            if piece is None:
                transfer.waiting = False
                continue
            number = self._native.transfer_submit_write(self._peer, *piece)
            if number <= 0:
                message = "Mooncake's engine refuses a write"
                raise RuntimeError(message)
            transfer.moving += 1
            self._moving[number] = transfer
            self._queue.append(transfer)

    def _pieces(
        self, source_pages: NDArray[np.int32], destination_pages: NDArray[np.int32]
    ) -> Iterator[tuple[int, int, int]]:
        """Merge the pages' blocks into runs, and cut these."""
        size = self._memory.block_bytes
        source = self._memory.blocks(source_pages).astype(np.int64)
        destination = self._memory.blocks(destination_pages).astype(np.int64)
        breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        lengths = np.diff(np.append(starts, source.size)) * size
        runs = zip(
            (source[starts] * size + self._memory.address).tolist(),
            (destination[starts] * size + self._remote_address).tolist(),
            lengths.tolist(),
            strict=True,
        )
        for source_at, destination_at, length in runs:
            for offset in range(0, length, _PIECE_BYTES):
                yield source_at + offset, destination_at + offset, min(_PIECE_BYTES, length - offset)
