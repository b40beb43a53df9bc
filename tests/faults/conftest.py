"""What the tests of faults share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Lines that can be hurt."""
    with Faults() as running:
        yield running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``chaos_seed`` runs with each of the first seeds."""
    if "chaos_seed" in metafunc.fixturenames:
        metafunc.parametrize("chaos_seed", range(metafunc.config.getoption("--chaos-seeds")))
