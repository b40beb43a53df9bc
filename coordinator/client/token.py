"""Head tokens with what else rank 0 has to tell to the ranks of its group, all in the same step.

A plain token is the inbox's: a ``Head``. Two flags may come on top, both about a coordinator that was
lost (``coordinator.client.lives``): that it is, and that the pages of its handoffs are quiet.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from coordinator.client.inbox import Head
from coordinator.errors import ProtocolError

_LOST: Final = 1
_QUIET: Final = 2
_LIFE_SHIFT: Final = 2
#: So many lives of rank 0 in a row are told apart.
_LIVES: Final = 64


class Token(NamedTuple):
    """A token, read.

    Attributes:
        head: up to where to drain.
        lost: then the coordinator is lost, and with it every room in flight.
        quiet: then the pages of lost coordinators are quiet.
        life: with a flag, how many coordinators the group had lost before, modulo 64: no token
            says the same as one of another life.

    """

    head: Head
    lost: bool = False
    quiet: bool = False
    life: int = 0

    def pack(self) -> bytes:
        """Return the token: 17 bytes, of which the last has the flags."""
        flags = _LOST * self.lost | _QUIET * self.quiet
        if flags:
            flags |= self.life % _LIVES << _LIFE_SHIFT
        return self.head.pack()[:-1] + bytes([flags])

    def begets(self, life: int) -> bool:
        """Whether ``life`` is the one that begins when this token, with ``lost``, is drained."""
        return self.lost and (self.life + 1) % _LIVES == life % _LIVES

    @classmethod
    def unpack(cls, token: bytes) -> Token:
        """Read a token.

        Raises:
            ProtocolError: it is none, or says what this version does not know.

        """
        flags = token[-1] if token else 0
        head = Head.unpack(token[:-1] + b"\0")
        kind = flags & (_LOST | _QUIET)
        if flags and kind not in {_LOST, _QUIET}:
            message = f"the head token has the flags {flags:#x}, which this version does not know"
            raise ProtocolError(message)
        return cls(head, kind == _LOST, kind == _QUIET, flags >> _LIFE_SHIFT)
