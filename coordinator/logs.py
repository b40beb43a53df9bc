"""The log: structured lines on stdout, JSON for machines or colours for people.

A line costs the caller about 3 µs and never waits: it is encoded where it is logged and goes into a
bounded queue; a thread of its own (``log_writer``) writes. When stdout does not take the lines, they
are dropped, counted, and a line says how many. A log call never raises.

Use::

    _log = get_logger()                                   # at the top of a module, before ``configure``
    _log.info("handoff.opened", group=..., room=..., attempt=...)

Events are dotted names; everything else is a key with a value. ``structlog.get_logger()`` gives the
same logger, a little slower, and structlog's own tools (``capture_logs``) work on it.
Records of the standard library's ``logging`` come out as lines of the same form.
"""

from __future__ import annotations

import atexit
import io
import logging
import sys
from itertools import islice
from time import gmtime, strftime, time
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TextIO, cast

import msgspec
import structlog
from structlog.dev import ConsoleRenderer, plain_traceback

from coordinator.log_stream import FileWriter, Follower, Recent
from coordinator.log_writer import DirectWriter, Writer
from coordinator.printable import printable, printable_json, printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

#: A longer line is cut down: its first keys, and the start of each value.
MAX_LINE_BYTES: Final = 16 << 10
_KEPT_KEYS: Final = 32
_KEPT_CHARACTERS: Final = 400
_DEBUG: Final = logging.DEBUG
_INFO: Final = logging.INFO
_WARNING: Final = logging.WARNING
_NUMBERS: Final = {"debug": _DEBUG, "info": _INFO, "warning": _WARNING, "error": logging.ERROR}
_encode: Final = msgspec.json.Encoder(enc_hook=repr).encode


class Outlet(Protocol):
    """Who gets JSON lines beside stdout (``log_stream``)."""

    level: int

    def put(self, line: bytes) -> None:
        """Take a line; must neither wait nor raise. Called from any thread."""


class _State:
    """What ``configure`` sets; one per process, as stdout is.

    ``level`` is what stdout gets; ``threshold`` is what anybody gets, and is looked at first.
    """

    level: int = _WARNING
    threshold: int = _WARNING
    outlets: tuple[Outlet, ...] = ()
    recent: Recent | None = None
    file: FileWriter | None = None
    stamp: tuple[int, str] = (0, "")
    writer: Writer | DirectWriter = DirectWriter(2)


class Logger(structlog.BoundLoggerBase):
    """A logger with a context; ``bind(key=value)`` gives one with more of it."""

    def debug(self, event: str, **values: object) -> None:
        """Log what helps to follow the program."""
        if _State.threshold <= _DEBUG:
            self._emit("debug", event, values)

    def info(self, event: str, **values: object) -> None:
        """Log what an operator may want to know."""
        if _State.threshold <= _INFO:
            self._emit("info", event, values)

    def warning(self, event: str, **values: object) -> None:
        """Log what may need an operator."""
        if _State.threshold <= _WARNING:
            self._emit("warning", event, values)

    def error(self, event: str, **values: object) -> None:
        """Log what has failed."""
        self._emit("error", event, values)

    def exception(self, event: str, **values: object) -> None:
        """Log what has failed, with the exception that is being handled."""
        self._emit("error", event, {"exc_info": True, **values})

    def _emit(self, level: str, event: str, values: dict[str, object]) -> None:
        entry: Any = {"timestamp": _timestamp(), "level": level, "event": event, **self._context, **values}
        try:
            outlets = _State.outlets
            plain = dict(entry) if outlets and _processors[0] is not _render_json else None
            for processor in self._processors:
                entry = processor(None, level, entry)
        except structlog.DropEvent:
            return
        number = _NUMBERS[level]
        if number >= _State.level:
            _State.writer.put(entry)
        if outlets:
            line = entry if plain is None else _render_json(None, level, plain)
            for outlet in outlets:
                if number >= outlet.level:
                    outlet.put(line)


class LogFile(NamedTuple):
    """A file for the log: ``[log]`` of the configuration says what each means."""

    path: Path
    max_bytes: int
    files: int


def configure(
    level: Level = "info",
    format: Format = "auto",  # noqa: A002 - the key's name in the configuration file
    stream: TextIO | None = None,
    file: LogFile | None = None,
) -> None:
    """Send the log to ``stream`` (stdout), which must have a file descriptor, and to ``file``, from now on.

    May be called again; what was logged before goes where it was to go.

    Raises:
        ConfigError: the file cannot be written.

    """
    close()
    stream = stream or sys.stdout
    stream.flush()
    terminal = stream.isatty()
    if format == "console" or (format == "auto" and terminal):
        _processors[:] = [_console_renderer(colors=terminal)]
    else:
        _processors[:] = [_render_json_for_terminal if terminal else _render_json]
    if file is not None:
        _State.file = FileWriter(
            *file, _NUMBERS[level], lambda count: _encode(_dropped(count)), _tell_of_file
        )
    _State.writer = Writer(stream.fileno(), _dropped_line)
    _State.recent = Recent(_NUMBERS[level])
    _State.outlets = tuple(outlet for outlet in (_State.recent, _State.file) if outlet is not None)
    set_level(level)
    logging.getLogger().handlers[:] = [_Bridge()]
    logging.captureWarnings(capture=True)


def set_level(level: Level) -> None:
    """Log lines of this level and above, from now on, in every logger. Followers have their own level."""
    _State.level = _NUMBERS[level]
    for outlet in (_State.recent, _State.file):
        if outlet is not None:
            outlet.level = _State.level
    _settle_threshold()


def level() -> Level:
    """Return the level that is set."""
    return next(name for name in ("debug", "info", "warning", "error") if _NUMBERS[name] >= _State.level)


def follow(level: Level, wanted: Callable[[bytes], bool]) -> Follower:
    """Give somebody all lines from ``level`` up that are ``wanted``, until ``unfollow``."""
    follower = Follower(_NUMBERS[level], wanted)
    _State.outlets = (*_State.outlets, follower)
    _settle_threshold()
    return follower


def unfollow(follower: Follower) -> None:
    """Give it no more lines."""
    _State.outlets = tuple(outlet for outlet in _State.outlets if outlet is not follower)
    _settle_threshold()


def last_lines(count: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
    """Return the last lines that are ``wanted``, as far as they are kept, as JSON, the oldest first."""
    return [] if _State.recent is None else _State.recent.last(count, wanted)


def get_logger(**context: object) -> Logger:
    """Return a logger whose lines all carry ``context``."""
    return Logger(None, _processors, context)


def alive() -> bool:
    """Whether the threads that write the log run."""
    return _State.writer.alive and (_State.file is None or _State.file.alive)


def dropped() -> int:
    """How many lines could not be written since ``configure``."""
    return _State.writer.dropped + (_State.file.dropped if _State.file is not None else 0)


def close(timeout_s: float = 1.0) -> None:
    """Write what is queued, waiting at most ``timeout_s``; later lines go straight to stderr."""
    writer, _State.writer = _State.writer, DirectWriter(2)
    file, _State.file = _State.file, None
    _State.recent = None
    _State.outlets = ()
    _settle_threshold()
    writer.close(timeout_s)
    if file is not None:
        file.close(timeout_s)


def _settle_threshold() -> None:
    """Look at the lines that stdout or somebody else wants."""
    _State.threshold = min([_State.level, *(outlet.level for outlet in _State.outlets)])
    logging.getLogger().setLevel(_State.threshold)


def _timestamp() -> str:
    now_s = time()
    second, prefix = _State.stamp
    if int(now_s) != second:
        second = int(now_s)
        prefix = strftime("%Y-%m-%dT%H:%M:%S.", gmtime(second))
        _State.stamp = (second, prefix)
    return f"{prefix}{int((now_s - second) * 1000):03d}Z"


def _render_json(_logger: WrappedLogger, _level: str, entry: EventDict) -> bytes:
    if "exc_info" in entry:
        _spell_out(entry)
    try:
        line = _encode(entry)
    except Exception:  # noqa: BLE001 - whatever a value does when it is encoded: a log call never raises
        return _encode(_plain(entry))
    return line if len(line) <= MAX_LINE_BYTES else _encode({**_plain(entry), "cut_from_bytes": len(line)})


def _render_json_for_terminal(logger: WrappedLogger, level: str, entry: EventDict) -> str:
    """Escape what a terminal would obey, and JSON does not: much in a line comes from others."""
    return printable_json(_render_json(logger, level, entry).decode())


def _console_renderer(*, colors: bool) -> Processor:
    render = ConsoleRenderer(colors=colors, exception_formatter=_write_traceback)

    def safe(logger: WrappedLogger, level: str, entry: EventDict) -> str | bytes:
        if entry.get("exc_info") is True:
            entry["exc_info"] = sys.exc_info()
        try:
            # Values of other kinds are shown by their repr, which escapes the same.
            texts = {key: printable(value) for key, value in entry.items() if isinstance(value, str)}
            return render(logger, level, {**entry, **texts})
        except Exception:  # noqa: BLE001 - see _render_json
            return _encode(_plain(entry))

    return safe


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = io.StringIO()
    plain_traceback(text, error)
    stream.write(printable_lines(text.getvalue()))


def _spell_out(entry: EventDict) -> None:
    """Replace ``exc_info`` by the traceback as text."""
    info = entry.pop("exc_info")
    if info is True:
        info = sys.exc_info()
    error = info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        entry["exception"] = "".join(format_exception(error))


def _plain(entry: EventDict) -> dict[str, object]:
    """Return the entry with values that can always be encoded, each shortened."""
    return {_text(key): _safe(value) for key, value in islice(entry.items(), _KEPT_KEYS)}


def _safe(value: object) -> object:
    return value if isinstance(value, (int, float)) else _text(value)


def _text(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # noqa: BLE001 - a broken repr must not stop the line
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return text[:_KEPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def _dropped_line(count: int) -> bytes | str:
    return cast("bytes | str", _processors[0](None, "warning", _dropped(count)))


def _dropped(count: int) -> EventDict:
    return {"timestamp": _timestamp(), "level": "warning", "event": "log.dropped", "lines": count}


def _tell_of_file(event: str, path: Path, error: OSError) -> None:
    get_logger().warning(event, file=str(path), why=error.strerror or str(error))


class _Bridge(logging.Handler):
    """Turns records of the standard library into lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record: the logger's name is the event, the text its ``message``."""
        level = "debug" if record.levelno < _INFO else record.levelname.lower()
        try:
            values: dict[str, object] = {"message": record.getMessage()}
        except (TypeError, ValueError) as error:
            values = {"message": str(record.msg), "problem": f"cannot be formatted: {error}"}
        if record.exc_info:
            values["exc_info"] = record.exc_info
        _bridged._emit(level, record.name, values)  # noqa: SLF001 - the level was judged by the library


_processors: list[Processor] = [_render_json]
_bridged: Final = get_logger()

structlog.configure(
    processors=_processors,
    wrapper_class=Logger,
    context_class=dict,
    logger_factory=lambda *_: None,
    cache_logger_on_first_use=True,
)
atexit.register(close)
