"""A sending process: ``sender_program.py BACKEND OPTIONS PATH BYTES ENDPOINT HOW``.

Connects, prints "connected" and waits for a line on stdin. Then it writes all of the file at PATH to the
peer, prints "sent" and ends. HOW: ``closed``, after closing the backend; ``not closed``, without;
``moving``, without, and without waiting for the write.
"""

from __future__ import annotations

import json
import sys

from backends.registry import load
from tests.backends.memory import SharedMemory
from tests.backends.rigs import until_done, whole


def main() -> None:
    """Run the sender."""
    name, options, path, size_bytes, endpoint, how = sys.argv[1:]
    backend = load(name)("sender", json.loads(options))
    memory = SharedMemory(int(size_bytes), path)
    backend.start(sends=True)
    backend.register(memory.region)
    link = backend.connect("peer", bytes.fromhex(endpoint))
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if how == "moving":
        link.write([whole(memory.bytes.size)]).poll()
    else:
        until_done(link.write([whole(memory.bytes.size)]))
    sys.stdout.write("sent\n")
    if how == "closed":
        backend.close()


if __name__ == "__main__":
    main()
