"""The bound that keeps holes out of the heap."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.processes import Programs

#: What a large block costs in the heap's own books: with the bound it is not in the heap at all.
PROGRAM = """
import ctypes, sys
from coordinator import heap

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Mallinfo2
settled = heap.settle()
for _ in range(3):
    bytearray(4 << 20)  # freed at once: from here on, glibc would keep such blocks in its heap
before = library.mallinfo2().hblkhd
block = bytearray(2 << 20)
print(settled, library.mallinfo2().hblkhd - before >= 2 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this")
def test_a_large_block_does_not_lie_in_the_heap(programs: Programs) -> None:
    program = programs.python("-c", PROGRAM)
    assert program.wait() == 0, program.output()
    assert program.output().strip() == "True True"
    # Without it, the same block is in the heap: the test can fail.
    program = programs.python("-c", PROGRAM.replace("heap.settle()", "True"))
    assert program.wait() == 0, program.output()
    assert program.output().strip() == "True False"
