"""``python -m coordinator`` is the command ``kv-coordinator``."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
