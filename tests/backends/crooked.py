"""Endpoints that are not what they should be."""

from __future__ import annotations

from typing import Any

import msgspec

#: A list of lists may also be of ports.
_LAST_PORT = 65535


def crooked(endpoint: bytes, how: str, size_bytes: int) -> bytes:
    """Bend an endpoint with one region of that size; what is none of these is left as it is."""

    def shifted(fields: Any) -> Any:  # noqa: ANN401 - both kinds of endpoints have regions of [address, size, ...]
        match fields:
            case [[int(address), *rest], *others] if address > _LAST_PORT:
                return [[address + size_bytes // 2, *rest], *others]
        return fields

    if how == "nonsense":
        return b"nonsense"
    if how == "cut short":
        return endpoint[: len(endpoint) // 2]
    if how == "half out of what is registered":
        return msgspec.msgpack.encode([shifted(fields) for fields in msgspec.msgpack.decode(endpoint)])
    return endpoint
