"""Writes the little TOML that a coordinator's configuration needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


def to_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Write tables of plain values: strings, numbers, true and false, and lists of them.

    In TOML such values look as they do in JSON.
    """
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)
