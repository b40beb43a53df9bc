"""What a line looks like, and that a log call never raises."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from coordinator import logs
from tests.support.logs import capture

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Read = Callable[[], list[dict[str, Any]]]


class BrokenRepr:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        message = "no"
        raise RuntimeError(message)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[io.TextIOWrapper]:
    """A file to log into; the log of the test run is put back afterwards."""
    root = logging.getLogger()
    handlers, level, processors = root.handlers[:], root.level, structlog.get_config()["processors"][:]
    log_level = logs.level()
    with (tmp_path / "log").open("w+") as file:
        yield file
        logs.close()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    structlog.get_config()["processors"][:] = processors
    logs.set_level(log_level)
    root.setLevel(level)


@pytest.fixture
def written(stream: io.TextIOWrapper) -> Read:
    """All lines so far, as objects; ends the log."""
    logs.configure("info", "json", stream)

    def read() -> list[dict[str, Any]]:
        logs.close()
        stream.seek(0)
        return [json.loads(line) for line in stream]

    return read


def test_a_line_is_a_json_object_with_time_level_event_and_keys(written: Read) -> None:
    logs.get_logger().info("handoff.opened", group="prefill-0", room=2**64 - 1, attempt=1, waited_s=0.25)
    (line,) = written()
    assert list(line) == ["timestamp", "level", "event", "group", "room", "attempt", "waited_s"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("timestamp"))
    assert line == {
        "level": "info",
        "event": "handoff.opened",
        "group": "prefill-0",
        "room": 2**64 - 1,
        "attempt": 1,
        "waited_s": 0.25,
    }


def test_each_level_has_its_name(written: Read) -> None:
    log = logs.get_logger()
    logs.set_level("debug")
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)("some.event")
    assert [line["level"] for line in written()] == ["debug", "info", "warning", "error"]


def test_the_level_can_be_changed_for_loggers_that_exist(written: Read) -> None:
    log, bound = logs.get_logger(), logs.get_logger().bind(room=1)
    log.debug("off")
    logs.set_level("debug")
    log.debug("on")
    bound.debug("on.too")
    logs.set_level("error")
    log.warning("off")
    bound.info("off")
    assert logs.level() == "error"
    assert [line["event"] for line in written()] == ["on", "on.too"]


def test_a_bound_logger_adds_its_context_and_the_call_has_the_last_word(written: Read) -> None:
    bound = logs.get_logger(group="p").bind(room=7)
    bound.info("one", attempt=1)
    bound.info("two", room=8)
    first, second = written()
    assert (first["group"], first["room"], first["attempt"]) == ("p", 7, 1)
    assert second["room"] == 8


def test_structlogs_own_loggers_write_the_same_lines(written: Read) -> None:
    structlog.get_logger().info("via.structlog", room=1)
    structlog.get_logger().debug("off")
    (line,) = written()
    assert (line["level"], line["event"], line["room"]) == ("info", "via.structlog", 1)


def test_an_exception_comes_with_its_traceback(written: Read) -> None:
    def fail() -> None:
        message = "the cause"
        raise ValueError(message)

    try:
        fail()
    except ValueError as error:
        logs.get_logger().exception("it.failed", room=1)
        logs.get_logger().warning("it.failed.too", exc_info=error)
    first, second = written()
    assert first["level"] == "error"
    for line in (first, second):
        assert line["exception"].startswith("Traceback")
        assert line["exception"].endswith("ValueError: the cause\n")
        assert "exc_info" not in line


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), None),
        ("\ud800", "\\ud800"),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        (BrokenRepr(), "<BrokenRepr: its repr raised RuntimeError>"),
        ("two\nlines\x1b[31m", "two\nlines\x1b[31m"),
        (ValueError("odd"), "ValueError('odd')"),
    ],
)
def test_no_value_makes_a_log_call_raise(written: Read, value: object, shown: object) -> None:
    logs.get_logger().info("odd.value", room=5, value=value)
    (line,) = written()
    assert line["value"] == shown
    assert line["room"] == 5


def test_one_call_is_one_line_whatever_is_in_it(written: Read) -> None:
    logs.get_logger().info("odd.value", value='\n{"event":"forged"}\n')
    assert len(written()) == 1


def test_a_huge_line_is_cut_and_says_so(written: Read) -> None:
    logs.get_logger().info("huge", room=5, value="x" * 1_000_000, more="y" * 1_000_000)
    (line,) = written()
    assert line["room"] == 5
    assert line["value"] == "x" * 400
    assert line["cut_from_bytes"] > 2_000_000


def test_records_of_the_standard_library_come_in_the_same_form(written: Read) -> None:
    logging.getLogger("backends.some").warning("lost %d bytes", 7)
    logging.getLogger("backends.some").info("shown")
    logging.getLogger("backends.some").debug("off")
    one, two = written()
    assert (one["level"], one["event"], one["message"]) == ("warning", "backends.some", "lost 7 bytes")
    assert two["message"] == "shown"


def test_a_record_that_cannot_be_formatted_is_written_as_it_is() -> None:
    code = (
        "import logging; from coordinator import logs; logs.configure('info', 'json');"
        "logging.getLogger('backends.some').warning('bad %d', 'text')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = json.loads(done.stdout)
    assert line["message"] == "bad %d"
    assert "cannot be formatted" in line["problem"]
    assert done.stderr == ""


def test_warnings_come_in_the_same_form(written: Read) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", UserWarning, stacklevel=1)
    (line,) = written()
    assert line["event"] == "py.warnings"
    assert "old thing" in line["message"]


def test_people_get_readable_lines(stream: io.TextIOWrapper) -> None:
    logs.configure("info", "console", stream)
    logs.get_logger().info("handoff.opened", room=7)
    logs.get_logger().info("odd", value=BrokenRepr())
    logs.close()
    stream.seek(0)
    first, second = stream.read().splitlines()
    assert "handoff.opened" in first
    assert "room=7" in first
    assert "\x1b" not in first  # a file is no terminal: no colours
    assert "its repr raised RuntimeError" in second


def test_no_text_of_others_reaches_the_terminal_of_people_as_it_is(stream: io.TextIOWrapper) -> None:
    """Some would give it another title, clear it, or more."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b2J"
    logs.configure("info", "console", stream)
    logs.get_logger().info(evil, why=evil, list=[evil])

    def fail() -> None:
        raise ValueError(evil)

    try:
        fail()
    except ValueError as error:
        logs.get_logger().warning("it.failed", error=error, exc_info=error)
    logs.close()
    stream.seek(0)
    text = stream.read()
    assert text.replace("\n", "").isprintable()
    assert text.count("\\x1b]0;owned\\x07\\x1b[2J\\x9b2J") == 5
    assert len(text.splitlines()) > 4, "a traceback has its lines"


def test_a_terminal_gets_colours_and_a_pipe_gets_json(programs_pty: Callable[[str], str]) -> None:
    code = "from coordinator import logs; logs.configure(); logs.get_logger().info('some.event', room=7)"
    on_terminal = programs_pty(code)
    assert "some.event" in on_terminal
    assert "\x1b[" in on_terminal
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(piped)["room"] == 7


def test_json_on_a_terminal_has_nothing_that_it_obeys(programs_pty: Callable[[str], str]) -> None:
    """And means the same: JSON itself leaves DEL and the controls from 128 on as they are."""
    code = (
        "from coordinator import logs; logs.configure(format='json');"
        "logs.get_logger().info('some.event', group='\\x7f\\x9b2J\\x1b')"
    )
    line = programs_pty(code).removesuffix("\r\n")
    assert line.isprintable()
    assert json.loads(line)["group"] == "\x7f\x9b2J\x1b"


@pytest.fixture
def programs_pty() -> Callable[[str], str]:
    """Runs Python code with a terminal as its stdout; returns what it printed there."""

    def run(code: str) -> str:
        master, slave = os.openpty()
        try:
            environment = {**os.environ, "TERM": "xterm-256color"}
            environment.pop("NO_COLOR", None)
            subprocess.run([sys.executable, "-c", code], stdout=slave, env=environment, check=True)
            return os.read(master, 65536).decode()
        finally:
            os.close(slave)
            os.close(master)

    return run


def test_what_is_logged_before_and_after_goes_to_stderr() -> None:
    code = (
        "from coordinator import logs; log = logs.get_logger();"
        "log.warning('before'); log.info('quiet');"
        "logs.configure('info', 'json'); log.info('during'); logs.close(); log.error('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["during"]
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["before", "after"]


def test_capture_collects_from_all_loggers_and_puts_the_log_back(written: Read) -> None:
    with capture() as captured:
        logs.get_logger(group="p").debug("one", room=1)
        structlog.get_logger().info("two")
    logs.get_logger().info("three")
    assert captured.events == ["one", "two"]
    assert captured.of("one")[0]["room"] == 1
    assert captured.of("one")[0]["group"] == "p"
    assert [line["event"] for line in written()] == ["three"]


def test_the_log_begins_anew_without_a_trace_of_the_former_one(
    stream: io.TextIOWrapper, tmp_path: Path
) -> None:
    """Neither its threads nor its lines, and who follows no more costs nothing."""
    before = threading.active_count()
    for _ in range(3):
        logs.configure("warning", "json", stream, logs.LogFile(tmp_path / "file", 1 << 20, 2))
        assert threading.active_count() == before + 2
        assert logs.last_lines(9, lambda _: True) == []
        logs.get_logger().warning("said")
        assert len(logs.last_lines(9, lambda _: True)) == 1
    logs.close()
    assert threading.active_count() == before
    assert logs.last_lines(9, lambda _: True) == []


async def test_details_are_made_only_while_somebody_follows_them(stream: io.TextIOWrapper) -> None:
    logs.configure("warning", "json", stream)
    root = logging.getLogger()
    follower = logs.follow("debug", lambda _: True)
    assert root.isEnabledFor(logging.DEBUG)
    logs.unfollow(follower)
    assert not root.isEnabledFor(logging.INFO)
    logs.set_level("info")
    assert root.isEnabledFor(logging.INFO)


@pytest.mark.parametrize("ends", ["writer", "file"])
def test_it_is_told_when_one_of_its_threads_has_ended(
    stream: io.TextIOWrapper, tmp_path: Path, ends: str
) -> None:
    logs.configure("info", "json", stream, logs.LogFile(tmp_path / "file", 1 << 20, 2))
    assert logs.alive()
    getattr(logs._State, ends).close(10)
    assert not logs.alive()


async def test_a_follower_sleeps_until_there_is_a_line_and_is_woken_by_it(stream: io.TextIOWrapper) -> None:
    logs.configure("info", "json", stream)
    follower = logs.follow("info", lambda line: b"wanted" in line)
    for _ in range(2):
        waiting = asyncio.create_task(follower.wait(3600))
        for _ in range(10):
            await asyncio.sleep(0)
        logs.get_logger().info("another")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        logs.get_logger().info("wanted")
        await asyncio.wait_for(waiting, 10)
        assert len(follower.take(9)[0]) == 1
    logs.unfollow(follower)
