"""A sender that never tires: ``hammer_program.py BACKEND OPTIONS BYTES ENDPOINT``.

Writes all of the peer's memory again and again, prints "first" after the first time and, when its link
is down, "lost" and why. Then it connects anew once, prints what comes of that, and ends.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from backends.base import BackendError, Region, Status
from backends.registry import load
from tests.backends.rigs import whole


def main() -> None:
    """Run the sender."""
    name, options, size_bytes, endpoint = sys.argv[1:]
    backend = load(name)("hammer", json.loads(options))
    memory = np.full(int(size_bytes), 7, np.uint8)
    backend.start(sends=True)
    backend.register(Region(memory.ctypes.data, memory.size))
    link = backend.connect("peer", bytes.fromhex(endpoint))
    said = False
    while True:
        try:
            transfer = link.write([whole(memory.size)])
            while transfer.poll() is Status.MOVING:
                pass
            if transfer.error is not None:
                raise transfer.error
        except BackendError as error:
            _say(f"lost {error}")
            break
        if not said:
            said = True
            _say("first")
    try:
        backend.connect("peer", bytes.fromhex(endpoint))
        _say("found")
    except BackendError as error:
        _say(f"gone {error}")
    backend.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
