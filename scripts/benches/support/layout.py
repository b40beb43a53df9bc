"""The smallest pages that there can be."""

from __future__ import annotations

from typing import Final

from coordinator.client import Layout

_HEAD_VALUES: Final = 64


def tiny_layout(world_size: int) -> Layout:
    """Lay out pages of 128 bytes in one plane, however many ranks there are."""
    return Layout(
        layers=1, page_tokens=1, kv_heads=world_size, head_size=_HEAD_VALUES, dtype="uint8", kv="together"
    )
