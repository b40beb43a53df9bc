"""The receiving side in a process of its own: ``peer_program.py BACKEND OPTIONS PATH:BYTES ...``.

Registers the files, prints its endpoint in hex on one line, and lives until its stdin ends.
"""

from __future__ import annotations

import json
import sys

from backends.registry import load
from tests.backends.memory import SharedMemory


def main() -> None:
    """Run the peer."""
    name, options, *files = sys.argv[1:]
    backend = load(name)("peer", json.loads(options))
    backend.start(sends=False)
    memories = []
    for file in files:
        path, _, size_bytes = file.rpartition(":")
        memory = SharedMemory(int(size_bytes), path)
        backend.register(memory.region)
        memories.append(memory)
    sys.stdout.write(backend.endpoint().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    backend.close()


if __name__ == "__main__":
    main()
