"""The log in a file that rotates."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from coordinator import logs
from coordinator.errors import ConfigError
from coordinator.logs import LogFile, get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Leave the log of the test run as it was."""
    root = logging.getLogger()
    handlers, level, processors = root.handlers[:], root.level, structlog.get_config()["processors"][:]
    log_level = logs.level()
    yield
    logs.close()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    structlog.get_config()["processors"][:] = processors
    logs.set_level(log_level)
    root.setLevel(level)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_file_gets_json_whatever_stdout_shows(tmp_path: Path, form: logs.Format) -> None:
    path = tmp_path / "log"
    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", form, stdout, LogFile(path, 1 << 20, 2))
        get_logger().info("test.line", number=1)
        get_logger().debug("test.detail")
        logs.set_level("debug")
        get_logger().debug("test.detail", number=2)
        logs.close()
    assert [(line["event"], line["number"]) for line in lines(path)] == [("test.line", 1), ("test.detail", 2)]
    assert "test.line" in (tmp_path / "stdout").read_text()


def test_a_full_file_is_set_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with (tmp_path / "stdout").open("w+") as stdout:
        for number in range(5):
            logs.configure("info", "json", stdout, LogFile(path, 3000, 3))
            for _ in range(10):
                get_logger().info("test.line", number=number, text="x" * 200)
            logs.close()  # all of it is written
    assert {file.name for file in tmp_path.iterdir()} == {"log", "log.1", "log.2", "stdout"}
    kept = [line["number"] for name in ("log.2", "log.1", "log") for line in lines(tmp_path / name)]
    assert kept == [2] * 10 + [3] * 10 + [4] * 10
    assert path.stat().st_mode & 0o007 == 0


def test_one_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with (tmp_path / "stdout").open("w+") as stdout:
        for number in range(2):
            logs.configure("info", "json", stdout, LogFile(path, 100, 1))
            get_logger().info("test.line", number=number, text="x" * 200)
            logs.close()
    assert [line["number"] for line in lines(path)] == [1]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        (tmp_path / "stdout").open("w+") as stdout,
        pytest.raises(ConfigError, match=r"log\.file: .* cannot be"),
    ):
        logs.configure("info", "json", stdout, LogFile(tmp_path / "nowhere" / "log", 100, 1))
