"""How rank 0 tells all ranks what to apply in a step: it rides the scheduler's own broadcast.

It looks like an abort of a request that cannot exist: a class of ours would have to be known to whoever
sorts what is received, and this one rides with the aborts that a scheduler decides on by itself.
"""

from __future__ import annotations

from typing import NamedTuple, Self

#: No request id begins with NUL.
PREFIX = "\0kv-coordinator:"


class Carrier(NamedTuple):
    """What all ranks do in the step in which they receive it.

    Attributes:
        on: the coordinator is there, and hears all ranks: it decides.
        token: drain through it first; empty: nothing is to be drained.

    """

    on: bool
    token: bytes

    def rid(self) -> str:
        """Return it as the id of a request."""
        return f"{PREFIX}{int(self.on)}{self.token.hex()}"

    @classmethod
    def read(cls, rid: object) -> Self | None:
        """Read it; None when ``rid`` is that of a request."""
        if not isinstance(rid, str) or not rid.startswith(PREFIX):
            return None
        text = rid.removeprefix(PREFIX)
        return cls(text[0] == "1", bytes.fromhex(text[1:]))
