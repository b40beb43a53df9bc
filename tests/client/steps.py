"""The ranks of one engine make a step together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.client.rank import Rank
    from coordinator.messages import Event


def step(ranks: Sequence[Rank]) -> list[Event]:
    """Make a step, in which all ranks must apply the same; return what."""
    token = ranks[0].head
    applied = [list(rank.drain(through=token)) for rank in ranks]
    assert all(events == applied[0] for events in applied)
    return applied[0]
