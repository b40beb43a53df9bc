"""Which prefill rank sends what to which decode rank: worked out once for each two kinds of engine."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from coordinator.events import Pairing
from coordinator.layout import mismatches
from coordinator.slices import legs

if TYPE_CHECKING:
    from coordinator.layout import Layout


@lru_cache(maxsize=256)
def pairing(prefill: Layout, prefill_world: int, decode: Layout, decode_world: int) -> Pairing | str:
    """How the ranks of two groups exchange pages, or a sentence that says why they cannot."""
    problems = mismatches(prefill, decode)
    if problems:
        return "; ".join(problems)
    pairs = legs(prefill, prefill_world, decode, decode_world)
    return Pairing.of(prefill_world, decode_world, pairs)
