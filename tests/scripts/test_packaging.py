"""The project file agrees with the tree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("backends", "coordinator")
        for file in (ROOT / top).rglob("__init__.py")
    }
    # What has a directory elsewhere has files only.
    elsewhere = PROJECT["tool"]["setuptools"]["package-dir"]
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | set(elsewhere)
    assert not any(file.suffix == ".py" for place in elsewhere.values() for file in (ROOT / place).iterdir())


def test_every_dependency_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    # The CUDA variant of Mooncake excludes the one that is tested here; its own pin is in the extra.
    wanted = [*PROJECT["project"]["dependencies"], *(name for extra in extras.values() for name in extra)]
    names = {re.split(r"[=<>~!]", name)[0] for name in wanted} - {"mooncake-transfer-engine"}
    assert names <= pinned


def test_torch_is_pinned_to_no_variant_and_required_by_nobody_who_does_not_ask() -> None:
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()
    assert not any(name.startswith("torch") for name in PROJECT["project"]["dependencies"])


@pytest.mark.parametrize("code", PROJECT["tool"]["ruff"]["lint"]["ignore"])
def test_every_exception_to_the_rules_says_why(code: str) -> None:
    lines = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if f'"{code}"' in line]
    assert lines
    assert all("# " in line for line in lines)
