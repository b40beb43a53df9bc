"""One process with everything loaded, from which the ranks of all tests here are forked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.sim.forks import ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        server = ForkServer(Path(directory), {**os.environ, "OMP_NUM_THREADS": "1"})
        yield server
        server.close()
