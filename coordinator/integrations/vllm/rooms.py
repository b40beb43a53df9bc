"""From the transfer id, by which both engines know a request, to the coordinator's room."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

_MAX_ROOM: Final = 2**64 - 1
_MAX_DIGITS: Final = len(str(_MAX_ROOM))
_BYTES: Final = 8


def room_of(transfer_id: object) -> int:
    """Return the room of a transfer: the number itself where it is one, else a hash of the text.

    A number may be written as text. Two texts have the same room with a probability of 2**-64.
    """
    text = str(transfer_id)
    # Clients choose it, and Python refuses to convert numbers of some thousand digits.
    digits = text.lstrip("0")
    if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS and int(digits) <= _MAX_ROOM:
        return int(digits)
    octets = text.encode(errors="surrogatepass")
    return int.from_bytes(blake2b(octets, digest_size=_BYTES).digest(), "little") or 1
