"""Run a worker: ``python -m coordinator.worker``, with its settings on stdin."""

from __future__ import annotations

from coordinator.worker.process import main

main()
