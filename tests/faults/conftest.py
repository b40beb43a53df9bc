"""What the tests of faults share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.sim.forks import ForkServer
from tests.support.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A storm with real processes takes as long as so many others.
_SEEDS_PER_PROCESS_SEED = 50


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """One process with everything loaded, from which ranks are forked."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        # Some tests bring ranks of their own.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        server = ForkServer(Path(directory), environment)
        yield server
        server.close()


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Lines that can be hurt."""
    with Faults() as running:
        yield running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``chaos_seed`` runs with each of the first seeds; one with processes, with fewer."""
    seeds = metafunc.config.getoption("--chaos-seeds")
    if "chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("chaos_seed", range(seeds))
    if "process_chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("process_chaos_seed", range(max(1, seeds // _SEEDS_PER_PROCESS_SEED)))
