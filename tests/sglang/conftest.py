"""One host with SGLang in it for all tests here; they are skipped where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from tests.sglang.rig import Host, python_with_sglang

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory with a short name: sockets are made in it."""
    place = Path(mkdtemp(prefix="kv-"))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def host(place: Path) -> Iterator[Host]:
    """The process that has imported SGLang."""
    python = python_with_sglang()
    if python is None:
        pytest.skip("there is no environment with SGLang; scripts/sglang-env makes it (2 GB, some minutes)")
    host = Host(python, place)
    yield host
    host.close()
