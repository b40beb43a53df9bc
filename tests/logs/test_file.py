"""The log in a file that rotates."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from coordinator import log_stream, logs
from coordinator.errors import ConfigError
from coordinator.log_stream import FileWriter
from coordinator.logs import LogFile, get_logger
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


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


#: What a line of a test does not fit into beside another one; five times as much takes several of them.
MAX_BYTES = 180


class Full:
    """A log whose file is full, with all the files that are kept beside it, and failures to set it aside.

    Attributes:
        path: the file.
        attempts: how often that has failed so far.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempts = 0
        for number in range(1, 5):
            path.with_name(f"{path.name}.{number}").write_text(f'{{"history":{number}}}\n')
        path.write_text('{"history":0}\n')

    @property
    def history(self) -> dict[str, int]:
        """In which file each of the former lines is."""
        return {
            file.name: line["history"]
            for file in self.path.parent.glob(f"{self.path.name}*")
            for line in lines(file)
            if "history" in line
        }

    def fail(self, *_: object) -> int:
        self.attempts += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    @property
    def written(self) -> int:
        """How many lines of a test are in the file."""
        return [line.get("event") for line in lines(self.path)].count("test.line")

    def write(self, count: int) -> None:
        """Write so many lines, each by itself; wait until it is there."""
        for _ in range(count):
            expected = self.written + 1
            get_logger().info("test.line", text="x" * 100)
            eventually(lambda: self.written == expected, what="the line is in the file")  # noqa: B023 - at once


def test_a_file_that_cannot_be_set_aside_loses_no_line_and_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any moved: another attempt to set it aside would move them again."""
    monkeypatch.setattr(log_stream, "ROTATE_AGAIN_S", 0.0, raising=False)
    full = Full(tmp_path / "log")
    before = full.history
    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", "json", stdout, LogFile(full.path, MAX_BYTES, 5))
        with monkeypatch.context() as broken:
            broken.setattr(FileWriter, "_open", full.fail)
            full.write(3)
            assert full.attempts >= 3
            assert full.history == before
            assert logs.dropped() == 0
        get_logger().info("test.last")
        logs.close()
    assert full.history == {"log.1": 0, "log.2": 1, "log.3": 2, "log.4": 3}, "it goes on as if nothing was"
    assert [line["event"] for line in lines(full.path)] == ["test.last"]
    kept = [line["event"] for line in lines(tmp_path / "log.1")[1:]]
    assert sorted(kept) == ["log.file_not_rotated"] + ["test.line"] * 3, "it is said once"
    assert {file.name for file in tmp_path.glob("log*")} == {"log", "log.1", "log.2", "log.3", "log.4"}


def test_a_file_that_cannot_be_renamed_costs_the_oldest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is mounted by itself."""
    monkeypatch.setattr(log_stream, "ROTATE_AGAIN_S", 0.0, raising=False)
    full = Full(tmp_path / "log")
    replace = Path.replace

    def busy(file: Path, target: Path) -> Path:
        if file == full.path:
            full.fail()
        return replace(file, target)

    monkeypatch.setattr(Path, "replace", busy)
    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", "json", stdout, LogFile(full.path, MAX_BYTES, 5))
        full.write(3)
        logs.close()
    assert full.attempts >= 3
    assert full.history == {"log": 0, "log.2": 1, "log.3": 2, "log.4": 3}
    assert "log.file_not_rotated" in (tmp_path / "stdout").read_text()


def test_a_file_that_can_never_be_set_aside_grows_no_more_than_all_files_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is on stdout, which tells it, and is counted; once it can be, it goes on."""
    monkeypatch.setattr(log_stream, "ROTATE_AGAIN_S", 0.0)
    full = Full(tmp_path / "log")
    told = ["log.file_not_rotated", "log.file_full"]
    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", "json", stdout, LogFile(full.path, MAX_BYTES, 5))
        writer = logs._State.file
        assert writer is not None
        with monkeypatch.context() as broken:
            broken.setattr(FileWriter, "_open", full.fail)
            for _ in range(30):
                get_logger().info("test.line", text="x" * 100)
                eventually(
                    lambda: writer._asleep and not writer._lines, what="the file's writer has nothing to do"
                )
                assert full.path.stat().st_size <= 5 * MAX_BYTES
        kept = [line["event"] for line in lines(full.path)[1:]]
        assert 2 < kept.count("test.line") < 6
        lost = logs.dropped()
        assert lost == 30 + len(told) - len(kept), "what is told of the file is lost there, too"
        get_logger().info("test.last")
        logs.close()
    shown = [line["event"] for line in lines(tmp_path / "stdout")]
    assert shown.count("test.line") == 30
    assert [event for event in shown if event in told] == told
    assert [line["event"] for line in lines(full.path)] == ["test.last", "log.dropped"]
    assert lines(full.path)[1]["lines"] == lost


def test_what_cannot_be_set_aside_is_not_tried_at_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(tmp_path / "log")
    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", "json", stdout, LogFile(full.path, MAX_BYTES, 5))
        monkeypatch.setattr(FileWriter, "_open", full.fail)
        full.write(3)
        logs.close()
    assert full.attempts == 1


def test_a_new_file_has_nothing_of_the_half_line_in_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    write = os.write

    def write_half(descriptor: int, data: memoryview) -> int:
        if len(data) == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:-10])

    with (tmp_path / "stdout").open("w+") as stdout:
        logs.configure("info", "json", stdout, LogFile(path, 100, 2))
        with monkeypatch.context() as full:
            full.setattr(os, "write", write_half)
            get_logger().info("test.line", text="x" * 100)
            eventually(lambda: logs.dropped() == 2, what="it is lost, on stdout as well")
        get_logger().info("test.last")
        logs.close()
    assert [line["event"] for line in lines(path)] == ["test.last", "log.dropped"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        (tmp_path / "stdout").open("w+") as stdout,
        pytest.raises(ConfigError, match=r"log\.file: .* cannot be"),
    ):
        logs.configure("info", "json", stdout, LogFile(tmp_path / "nowhere" / "log", 100, 1))
