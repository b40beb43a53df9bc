"""The environment with vLLM, and a tiny model; all tests here need ``--vllm``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from tests.vllm.prompts import twenty
from tests.vllm.rig import ROOT, Engine, python_with_vllm

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
    # What ranks of engines share, and do not remove when they are killed.
    for name in place.glob("vllm_dist_*"):
        for left in Path("/dev/shm").glob(f"{name.name}*"):  # noqa: S108 - where vLLM has it
            left.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Twenty prompts."""
    return twenty()


@pytest.fixture(scope="session")
def expected(python: str, model: Path, place: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What a single engine of one rank answers, which has no connector."""
    with Engine(python, model, place) as single:
        single.ready()
        answers = [single.ask(prompt).tokens for prompt in prompts]
    assert len({tuple(tokens) for tokens in answers}) == len(prompts), "the answers depend on the prompts"
    return answers


@pytest.fixture(scope="session")
def model(python: str, place: Path) -> Path:
    """A tiny model with random weights."""
    model = place / "model"
    subprocess.run([python, str(ROOT / "scripts" / "vllm_model.py"), str(model)], check=True, timeout=120)
    return model
