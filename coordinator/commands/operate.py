"""The commands of operators: they ask a running coordinator over its HTTP.

What they need is imported when one of them runs: this module is loaded by every command, ``serve`` too.
"""

from __future__ import annotations

import json as json_text
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from coordinator import __version__
from coordinator.errors import ConfigError, NoAnswerError
from coordinator.printable import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from rich.console import Console, RenderableType

    from coordinator.commands.caller import Caller

FAILED: Final = 1
#: How many of the oldest handoffs ``status`` and ``top`` show.
SHOWN: Final = 10
EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 refused, or not there; 2 the command line or the configuration cannot be used; "
    "3 no coordinator answers; 130 interrupted."
)
_STATUS_CODES: Final = EXIT_CODES.replace("1 refused, or not there", "1 not ready")
Level = Literal["debug", "info", "warning", "error"]

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="KV_COORDINATOR_URL",
        metavar="URL",
        help="Where the coordinator is, such as http://127.0.0.1:7780. Left out: as its configuration says.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The coordinator's TOML file: http.address in it says where it is."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="KV_COORDINATOR_TOKEN_FILE",
        metavar="FILE",
        help="A file with the token. Left out: as the configuration says.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Room = Annotated[int, typer.Argument(min=1, help="The request's id.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=_STATUS_CODES)(status)
    for command in (show, top, cancel, drain, resume, reload, logs):
        app.command(epilog=EXIT_CODES)(command)


def status(
    *, url: Url = "", config: ConfigFile = None, token_file: TokenFile = None, json: Json = False
) -> None:
    """Show a running coordinator at a glance: is it ready, and what has waited longest?"""
    caller = _caller(url, config, token_file)
    with _understood(caller):
        answer, oldest = _glance(caller)
        if json:
            _print_json({**answer, "handoffs": oldest})
        else:
            _console().print(_status(answer, oldest))
        ready = answer["ready"]
    if not ready:
        raise typer.Exit(FAILED)


def show(
    room: Room,
    *,
    url: Url = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Show the whole story of a request: what it waits for, what each rank has said, how it ended."""
    caller = _caller(url, config, token_file)
    _print_story(caller, caller.get(f"/v1/handoffs/{room}"), json=json)


def top(
    *,
    url: Url = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a running coordinator; ends with Ctrl-C. Without a terminal, one look a line of dashes apart."""
    from rich.live import Live

    caller = _caller(url, config, token_file)
    console = _console()
    with _understood(caller):
        if not console.is_terminal:
            while True:
                console.print(_status(*_glance(caller)))
                console.print("-" * 20)
                time.sleep(interval)
        with Live(_status(*_glance(caller)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_status(*_glance(caller)), refresh=True)


def cancel(
    room: Room,
    *,
    why: Annotated[str, typer.Option(help="What every rank of both engines hears.")] = "",
    url: Url = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Fail a request that is in flight; its pages come back when they are quiet."""
    caller = _caller(url, config, token_file)
    _print_story(caller, caller.post(f"/v1/handoffs/{room}/cancel", {"why": why}), json=json)


def drain(
    *, url: Url = "", config: ConfigFile = None, token_file: TokenFile = None, json: Json = False
) -> None:
    """Admit no new requests; those in flight go on, and the coordinator is not ready."""
    _admission(_caller(url, config, token_file), "/v1/drain", json=json)


def resume(
    *, url: Url = "", config: ConfigFile = None, token_file: TokenFile = None, json: Json = False
) -> None:
    """Admit new requests again, after drain."""
    _admission(_caller(url, config, token_file), "/v1/resume", json=json)


def reload(
    *, url: Url = "", config: ConfigFile = None, token_file: TokenFile = None, json: Json = False
) -> None:
    """Have the coordinator read its configuration again, and apply all of it or nothing."""
    caller = _caller(url, config, token_file)
    answer = caller.post("/v1/reload")
    with _understood(caller):
        if json:
            _print_json(answer)
        else:
            typer.echo(printable(f"changed: {', '.join(answer['changed']) or 'nothing'}"))


def logs(  # noqa: PLR0913 - each is an option
    *,
    url: Url = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")
    ] = False,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, max=1000, help="How many of the last lines.")
    ] = 50,
    room: Annotated[int | None, typer.Option(min=1, help="Only lines about this request.")] = None,
    group: Annotated[str | None, typer.Option(help="Only lines about this engine, or a rank of it.")] = None,
    level: Annotated[Level, typer.Option(help="Only lines from this level up.")] = "info",
    json: Json = False,
) -> None:
    """Show the last lines of the log, and with --follow those that come."""
    from coordinator.commands import shown

    caller = _caller(url, config, token_file)
    wanted = {"room": room, "group": group, "level": level}
    lines = _followed(caller, count, wanted) if follow else caller.lines("/v1/logs", count=count, **wanted)
    console = _console()
    with closing(lines), _understood(caller):
        for line in lines:
            if json:
                typer.echo(printable_json(line))
            else:
                console.print(shown.log_line(json_text.loads(line)), soft_wrap=True)


def _followed(caller: Caller, count: int, wanted: dict[str, Any]) -> Generator[str, None, None]:
    """Yield the lines of the log as they come; what was lost on the way is a line, too."""
    lost = False
    for line in caller.lines("/v1/events", backlog=count, **wanted):
        field, _, value = line.partition(": ")
        if field == "event":
            lost = value == "dropped"
        elif field == "data":
            yield json_text.dumps({"event": "log.lost", **json_text.loads(value)}) if lost else value
            lost = False


def _caller(url: str, path: Path | None, token_file: Path | None) -> Caller:
    """Find out where the coordinator is, and with which token."""
    from coordinator.commands.caller import Caller, url_of
    from coordinator.config import Config, load

    settings = (Config() if path is None else load(path)).http
    file = token_file or settings.token_file
    token = settings.token
    if file is not None:
        try:
            token = file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError([f"the token's file {file} cannot be read: {error}"]) from error
    return Caller(url or url_of(settings), token)


def _glance(caller: Caller) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answer = caller.get("/v1/status")
    found = caller.get("/v1/handoffs", limit=SHOWN)["handoffs"]
    return answer, found


@contextmanager
def _understood(caller: Caller) -> Iterator[None]:
    """Show an answer inside of this.

    Raises:
        NoAnswerError: it was JSON, but is no answer of a coordinator, or of one of another version.

    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        message = (
            f"no coordinator answers at {caller.url}: what is there answers with something else "
            f"({type(error).__name__}: {error}); or is it one of another version than {__version__}?"
        )
        raise NoAnswerError(printable(message)) from error


def _admission(caller: Caller, path: str, *, json: bool) -> None:
    answer = caller.post(path)
    with _understood(caller):
        if json:
            _print_json(answer)
        else:
            doing = "no new handoffs are admitted" if answer["draining"] else "new handoffs are admitted"
            typer.echo(printable(f"{doing}; {answer['in_flight']} are in flight"))


def _status(answer: dict[str, Any], oldest: list[dict[str, Any]]) -> RenderableType:
    from coordinator.commands import shown

    return shown.status(answer, oldest)


def _print_story(caller: Caller, answer: dict[str, Any], *, json: bool) -> None:
    from coordinator.commands import shown

    with _understood(caller):
        if json:
            _print_json(answer)
        else:
            _console().print(shown.story(answer))


def _console() -> Console:
    from rich.console import Console

    # Nor is there markup in what comes from others.
    return Console(highlight=False, markup=False)


def _print_json(answer: object) -> None:
    typer.echo(printable_json(json_text.dumps(answer, indent=2)))
