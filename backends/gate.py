"""A gate through which every writer on this host passes: shut and empty, it proves that none writes.

On one host a writer may copy into our memory by itself, with nobody's help (through a mapping of our
file, or the kernel's ``process_vm_writev``); then no engine of ours can be destroyed to stop it. So
the receiving side opens a gate on the memory's file; a writer enters before it copies, and leaves
when nothing of it moves any more. Shut, the gate lets nobody in; and it is empty when all have left,
or are dead.

A gate is two locked bytes far beyond the end of the file, so it needs no cleaning up: the one is
locked for as long as the gate is open, the other one is shared by those who have entered.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

from backends.file_locks import Range, holder, try_lock, unlock
from backends.memory import open_shared

#: Gates lie behind this byte; the bytes before it are free for other uses.
GATES_FROM: Final = 1 << 61
_NUMBER_BITS: Final = 40


def _open_byte(number: int) -> Range:
    return Range(GATES_FROM + 2 * number, 1)


def _entered_byte(number: int) -> Range:
    return Range(GATES_FROM + 2 * number + 1, 1)


class Gate:
    """The receiving side's gate; open from the start.

    Attributes:
        number: under which writers find it; no other gate of the file has it.

    """

    def __init__(self, descriptor: int) -> None:
        """Open a gate on the file behind ``descriptor``, which is the gate's from now on."""
        self._descriptor = descriptor
        self.number = 0
        # Taken by another gate once in 2**40 times.
        while not self.number or not try_lock(descriptor, _open_byte(self.number)):
            self.number = secrets.randbits(_NUMBER_BITS)

    def shut(self) -> None:
        """Let nobody in any more. Calling it twice is fine."""
        if self._descriptor >= 0:
            unlock(self._descriptor, _open_byte(self.number))

    def is_empty(self) -> bool:
        """Whether all writers have left the gate, which is shut; then it stays so."""
        if self._descriptor >= 0:
            if not try_lock(self._descriptor, _entered_byte(self.number)):
                return False
            self.close()
        return True

    def close(self) -> None:
        """Give the descriptor back. Calling it twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Passage:
    """A writer's way through a gate. Not thread-safe."""

    def __init__(self, descriptor: int, number: int) -> None:
        """Be outside of gate ``number`` of the file behind ``descriptor``; closing that is the caller's."""
        self._descriptor = descriptor
        self._number = number
        self._inside = False
        # The lock is one for a process and its forked children: none of these may give it back.
        self._process = os.getpid()

    @classmethod
    def at(cls, path: str, size_bytes: int, number: int) -> Passage:
        """Find a gate by its file; ``close`` gives back what that takes.

        Raises:
            InvalidTransferError: the file is not what it should be, or cannot be opened.

        """
        return cls(open_shared(path, size_bytes), number)

    def is_open(self) -> bool:
        """Whether the gate is open: its owner is there."""
        return self._descriptor >= 0 and holder(self._descriptor, _open_byte(self._number)) is not None

    def enter(self) -> bool:
        """Go in, unless inside already; false when the gate is shut: then nothing may be begun."""
        if self._descriptor < 0:
            return False
        if self._inside:
            return self.is_open()  # What was begun is still there: only its end lets us leave.
        # In this order: whoever shuts the gate and then looks must see who had found it open.
        self._inside = try_lock(self._descriptor, _entered_byte(self._number), shared=True)
        if self._inside and not self.is_open():
            self.leave()
        return self._inside

    def leave(self) -> None:
        """Nothing of ours moves any more. Calling it outside is fine."""
        if self._inside and os.getpid() == self._process:
            self._inside = False
            unlock(self._descriptor, _entered_byte(self._number))

    def close(self) -> None:
        """Leave for good, and give the descriptor back."""
        # By closing alone, a child that was forked meanwhile would stay inside.
        self.leave()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
