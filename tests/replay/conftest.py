"""What the tests of the replay share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Write lines of a trace; returns its file."""

    def written(lines: list[dict[str, Any]]) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return written
