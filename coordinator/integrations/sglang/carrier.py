"""How rank 0 tells all ranks what to apply in a step: it rides the scheduler's own broadcast.

It is an abort of a request that does not exist: a class of ours would have to be known to whoever sorts
what is received, and this one rides with the aborts that a scheduler decides on by itself.

The id of that request proves nothing: SGLang's clients choose the ids of their requests, and abort them.
What the carrier says is in the abort's message, which no client can set.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

#: The id that is aborted.
RID: Final = "\0kv-coordinator"
_TOKENS_BYTES: Final = (0, 17)


class Carrier(NamedTuple):
    """What all ranks do in the step in which they receive it.

    Attributes:
        on: the coordinator is there, and hears all ranks: it decides.
        token: drain through it first; empty: nothing is to be drained.

    """

    on: bool
    token: bytes

    def text(self) -> str:
        """Return it as the message of an abort."""
        return f"{int(self.on)}{self.token.hex()}"

    @classmethod
    def read(cls, text: object) -> Self | None:
        """Read it; None when ``text`` is none of ours."""
        if not isinstance(text, str) or text[:1] not in {"0", "1"}:
            return None
        try:
            token = bytes.fromhex(text[1:])
        except ValueError:
            return None
        return cls(text[0] == "1", token) if len(token) in _TOKENS_BYTES else None
