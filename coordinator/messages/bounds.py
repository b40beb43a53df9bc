"""The bounds of everything on the wire, and the kinds of fields that have them."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

VERSION: Final = 2
PAGE_BYTES: Final = 4
#: Largest aux blob that a handoff carries (first token, sampling state, hidden states).
MAX_AUX_BYTES: Final = 1 << 20
MAX_NAME: Final = 128
MAX_WORLD: Final = 1024
#: Pieces of memory that a pool may consist of.
MAX_REGIONS: Final = 4096
MAX_ITEMS: Final = 1024
#: How many of its last events a rank remembers for a coordinator that has to start anew.
MAX_REMEMBERED: Final = 1024
MAX_HELD: Final = 1 << 18
#: Default bound of a whole frame: the pages of 512K one-token pages, twice over.
MAX_FRAME_BYTES: Final = 8 << 20
#: The backend of prefill ranks that move the bytes by themselves and only tell what becomes of it.
EXTERNAL: Final = "external"

#: msgpack itself ends at 2**64 - 1; msgspec takes no larger bound than an int64.
U64 = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_WORLD)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[A-Za-z0-9._:-]+\Z")]
Text = Annotated[str, Meta(max_length=4096)]
#: 0 is the null id: engines use it for "no room".
Room = Annotated[int, Meta(ge=1)]
Aux = Annotated[bytes, Meta(max_length=MAX_AUX_BYTES)]
