"""Endpoints that are not what they should be."""

from __future__ import annotations

from typing import Any

import msgspec


def crooked(endpoint: bytes, how: str, size_bytes: int) -> bytes:
    """Bend an endpoint with one region of that size; what is none of these is left as it is."""

    def shifted(fields: Any) -> Any:  # noqa: ANN401 - both kinds of endpoints have regions of [address, size, ...]
        if isinstance(fields, list) and fields and isinstance(fields[0], list):
            (address, *rest), *others = fields
            return [[address + size_bytes // 2, *rest], *others]
        return fields

    if how == "nonsense":
        return b"nonsense"
    if how == "cut short":
        return endpoint[: len(endpoint) // 2]
    if how == "half out of what is registered":
        return msgspec.msgpack.encode([shifted(fields) for fields in msgspec.msgpack.decode(endpoint)])
    return endpoint
