"""Keeps the holes out of the C library's heap.

The tables of what has ended lately are some 100 KiB each, and are made anew every few thousand
handoffs. glibc takes blocks of that size from the kernel only until it has seen one being freed; from
then on they lie in the heap, between small ones, and each leaves a hole that the next one does not
fit: 6 % more memory after 200,000 handoffs, though nothing more was held. A fixed bound ends that.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: Blocks of this size and more come from the kernel one by one, and go back to it.
MMAP_BYTES: Final = 64 << 10
#: ``M_MMAP_THRESHOLD`` of <malloc.h>.
_M_MMAP_THRESHOLD: Final = -3


def settle() -> bool:
    """Set the bound, for the whole process; False where the C library knows no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) == 1
