"""The picture of the state machine in the documents is the machine's."""

from __future__ import annotations

import pytest

from coordinator.table import TABLE
from scripts.state_diagram import TARGET, Found, explore, page


@pytest.fixture(scope="module")
def found() -> Found:
    return explore()


def test_the_page_is_up_to_date(found: Found) -> None:
    """When this fails, run ``scripts/diagram`` and look at what changed."""
    assert TARGET.read_text(encoding="utf-8") == page(found)


def test_the_page_knows_every_pair_of_the_table(found: Found) -> None:
    assert set(found) == {(state, event) for state, row in TABLE.items() for event in row}
