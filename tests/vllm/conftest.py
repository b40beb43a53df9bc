"""The environment with vLLM, and a tiny model; all tests here need ``--vllm``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from tests.vllm.rig import ROOT, python_with_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def python() -> str:
    """The python that has vLLM."""
    found = python_with_vllm()
    if found is None:
        pytest.fail("there is no environment with vLLM; scripts/vllm-env makes it (2 GB, some minutes)")
    return found


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory with a short name: sockets are made in it."""
    place = Path(mkdtemp(prefix="kvv-"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def model(python: str, place: Path) -> Path:
    """A tiny model with random weights."""
    model = place / "model"
    subprocess.run([python, str(ROOT / "scripts" / "vllm_model.py"), str(model)], check=True, timeout=120)
    return model
