"""The page lists of one handoff: what each rank has named so far, and what can move by now.

A leg's pages can move as soon as they are known at both ends. The prefill side names them chunk by
chunk from position 0 on; the decode side names them at once, from behind its prefix on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from coordinator.events import OWN
from coordinator.messages import PAGE_BYTES

if TYPE_CHECKING:
    from coordinator.events import Leg, Pairing

#: How many missing things a sentence names before it only counts the rest.
NAMED: Final = 8


class _Source(msgspec.Struct):
    """What one prefill rank has sent so far."""

    pages: bytes = b""
    last: bool = False

    @property
    def count(self) -> int:
        return len(self.pages) // PAGE_BYTES


class _Target(msgspec.Struct, frozen=True):
    """What one decode rank has offered."""

    pages: bytes
    prefix_pages: int

    @property
    def count(self) -> int:
        """Pages of the whole room, as this rank sees it."""
        return self.prefix_pages + len(self.pages) // PAGE_BYTES


class Legs:
    """What has been sent and offered, and how far each leg has been started.

    Attributes:
        complete: how many prefill ranks have sent their last chunk.

    """

    __slots__ = ("_cursors", "_pairing", "_sources", "_targets", "complete")

    def __init__(self) -> None:
        """Nothing is known."""
        self.complete = 0
        self._pairing: Pairing | None = None
        self._sources: dict[int, _Source] = {}
        self._targets: dict[int, _Target] = {}
        self._cursors: dict[Leg, int] = {}

    @property
    def paired(self) -> bool:
        """Whether both groups are known."""
        return self._pairing is not None

    @property
    def all_in(self) -> bool:
        """Whether every rank of both groups has said all that it had to say."""
        pairing = self._pairing
        return (
            pairing is not None
            and self.complete == pairing.prefill_world
            and len(self._targets) == pairing.decode_world
        )

    def pair(self, pairing: Pairing) -> tuple[Leg, ...]:
        """Learn which ranks exchange pages; returns the legs whose source is known."""
        self._pairing = pairing
        return tuple(leg for rank in self._sources for leg in pairing.by_source[rank])

    def open(self, rank: int) -> bool:
        """A prefill rank knows the room; False when it has said its last word on it before."""
        return not self._sources.setdefault(rank, _Source()).last

    def send(self, rank: int, pages: bytes, *, last: bool) -> tuple[Leg, ...]:
        """Append pages of a prefill rank; returns the legs that may go on. ``open`` it first."""
        source = self._sources[rank]
        source.pages = source.pages + pages if source.pages else pages
        if last:
            source.last = True
            self.complete += 1
        return self._pairing.by_source[rank] if self._pairing is not None else ()

    def offer(self, rank: int, pages: bytes, prefix_pages: int) -> tuple[Leg, ...] | None:
        """Note the pages of a decode rank; returns the legs that may go on, or None if it has offered."""
        if rank in self._targets:
            return None
        self._targets[rank] = _Target(pages, prefix_pages)
        return self._pairing.by_destination[rank] if self._pairing is not None else ()

    def next(self, leg: Leg) -> tuple[bytes, bytes] | str | None:
        """Take what can move on a leg now.

        Returns:
            source pages and destination pages, of equal length; or a sentence when the two ends can
            never match; or None when there is nothing to move.

        """
        source = self._sources.get(leg[0])
        target = self._targets.get(leg[1])
        if source is None or target is None:
            return None
        sent, room = source.count, target.count
        if sent > room or (source.last and sent < room):
            so_far = "" if source.last else " so far"
            behind = f"{room - target.prefix_pages} behind a prefix of {target.prefix_pages}"
            return f"prefill rank {leg[0]} sent {sent} pages{so_far}, decode rank {leg[1]} offered {behind}"
        first = max(self._cursors.get(leg, 0), target.prefix_pages)
        if sent <= first:
            return None
        self._cursors[leg] = sent
        start = (first - target.prefix_pages) * PAGE_BYTES
        length = (sent - first) * PAGE_BYTES
        return source.pages[first * PAGE_BYTES :], target.pages[start : start + length]

    def sent_pages(self, rank: int) -> int:
        """Pages that a prefill rank has sent so far."""
        source = self._sources.get(rank)
        return 0 if source is None else source.count

    def sent(self) -> dict[int, tuple[int, bool]]:
        """For each prefill rank that spoke: how many pages it has sent, and whether that was the last."""
        return {rank: (source.count, source.last) for rank, source in self._sources.items()}

    def offered(self) -> dict[int, int]:
        """For each decode rank that has offered: how many pages the room has, its prefix included."""
        return {rank: target.count for rank, target in self._targets.items()}

    def forget(self) -> None:
        """Drop the page lists: nothing starts after the verdict."""
        for source in self._sources.values():
            source.pages = b""
        self._targets.clear()
        self._cursors.clear()

    def missing(self, prefill: str, decode: str, moving: set[Leg]) -> str:
        """Say in one sentence what is still missing; ``moving`` are the legs under way."""
        parts: list[str] = []
        if not self._sources:
            parts.append(f"any sign of prefill for this room from {prefill}")
        own = self._pairing is not None and self._pairing.own
        if not self._targets and not own:
            parts.append(f"the offer of {decode}")
        if self._pairing is not None and self._sources:
            parts += [
                f"prefill-complete of {prefill}/{rank}"
                for rank in range(self._pairing.prefill_world)
                if not (rank in self._sources and self._sources[rank].last)
            ]
        if self._pairing is not None and self._targets:
            parts += [
                f"the offer of {decode}/{rank}"
                for rank in range(self._pairing.decode_world)
                if rank not in self._targets
            ]
        parts += [
            f"the engine's own transfer from {prefill}/{p}"
            if d == OWN
            else f"the leg {prefill}/{p} -> {decode}/{d}"
            for p, d in sorted(moving)
        ]
        more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
        return ", ".join(parts[:NAMED]) + more

    def validate(self) -> None:
        """Assert that no leg ran ahead of what is known at its two ends."""
        assert self.complete == sum(source.last for source in self._sources.values())
        for (p, d), cursor in self._cursors.items():
            assert cursor <= min(self._sources[p].count, self._targets[d].count), "a leg ran ahead"
