"""The command line: ``kv-coordinator``.

Each command imports what it needs when it runs, so that help comes at once and ``serve`` loads
nothing that a coordinator does not use.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from backends.base import BackendError, BackendUnavailableError
from coordinator import __version__
from coordinator.commands import operate
from coordinator.errors import ConfigError, CoordinatorError, NoAnswerError

if TYPE_CHECKING:
    from coordinator.config import Config

OK: Final = 0
FAILED: Final = 1
UNUSABLE: Final = 2
NO_ANSWER: Final = 3
INTERRUPTED: Final = 130

_EXIT_CODES: Final = "Exit codes: 0 done, 1 failed, 2 the configuration or the command line cannot be used."

app = typer.Typer(
    name="kv-coordinator",
    help="Owns each handoff of KV-cache pages from a prefill engine to a decode engine.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A TOML file. Left out: the built-in default, as in configs/local.toml.",
    ),
]


class DemoBackend(StrEnum):
    """What can move the pages of the demo."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    LOOPBACK = "loopback"


class DemoHosting(StrEnum):
    """Who can run the workers of the demo."""

    COORDINATOR = "coordinator"
    RANK = "rank"


@app.command(epilog=_EXIT_CODES)
def serve(config: ConfigFile = None) -> None:
    """Run a coordinator until SIGTERM or SIGINT; its log goes to stdout."""
    settings = _configuration(config)
    from coordinator import process

    raise typer.Exit(process.run(settings, config))


@app.command(epilog=_EXIT_CODES)
def check(config: ConfigFile = None) -> None:
    """Validate a configuration, and do nothing else. Every mistake is listed, one a line."""
    settings = _configuration(config)
    name = str(config or "the built-in default")
    unchecked = _check_options(settings, name)
    typer.echo(f"{name} can be used.")
    for line in [*_summary(settings), *unchecked]:
        typer.echo(f"  {line}")


@app.command(
    epilog="Exit codes: 0 all is well; 1 a page is corrupt, a handoff has no verdict, ranks disagree, "
    "or the demo could not run; 2 what was asked for cannot be done; 130 interrupted."
)
def demo(
    *,
    backend: Annotated[DemoBackend, typer.Option(help="What moves the pages.")] = DemoBackend.LOOPBACK,
    prefill_tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks of the prefill engine.")] = 2,
    decode_tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks of the decode engine.")] = 2,
    layout: Annotated[
        str,
        typer.Option(metavar="LAYOUT", help="Pages of this model, by name or .toml file; else small ones."),
    ] = "",
    handoffs: Annotated[
        int, typer.Option(min=3, max=1_000_000, help="How many requests are handed over.")
    ] = 200,
    hosting: Annotated[
        DemoHosting,
        typer.Option(help="Who runs the workers: the coordinator, or each prefill rank its own."),
    ] = DemoHosting.COORDINATOR,
    kill_coordinator: Annotated[
        bool,
        typer.Option("--kill-coordinator", help="Kill the coordinator in the middle, instead of decode."),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the result to this file as JSON, too."),
    ] = None,
) -> None:
    """Watch pages travel between simulated engines, with decode killed and restarted in the middle."""
    from coordinator.sim import demo as show

    options = show.DemoOptions(
        backend=backend.value,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        layout=layout,
        handoffs=handoffs,
        kill_coordinator=kill_coordinator,
        json_path=json,
        hosting=hosting.value,
    )
    raise typer.Exit(show.run(options))


@app.command(
    epilog="Exit codes: 0 all is well; 1 a page is corrupt, a handoff has no verdict, ranks disagree, "
    "or the replay could not run; 2 what was asked for cannot be done; 130 interrupted."
)
def replay(  # noqa: PLR0913 - each is an option of the command line
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="JSON lines with timestamp (ms), input_length, output_length (tokens), hash_ids; or .gz.",
        ),
    ],
    *,
    speed: Annotated[float, typer.Option(min=0.01, max=1000.0, help="How many times faster.")] = 1.0,
    first: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="Only the first so many seconds of the trace."),
    ] = None,
    layout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="Pages of this model, by name or .toml file.")
    ] = "Llama-3.1-8B",
    scale: Annotated[
        int,
        typer.Option(
            metavar="BYTES", min=0, help="Cut a page to so many bytes; left out: until all pools fit."
        ),
    ] = 0,
    backend: Annotated[DemoBackend, typer.Option(help="What moves the pages.")] = DemoBackend.LOOPBACK,
    prefill_groups: Annotated[int, typer.Option(min=1, max=16, help="Prefill engines.")] = 2,
    prefill_tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks of each.")] = 2,
    decode_groups: Annotated[int, typer.Option(min=1, max=16, help="Decode engines.")] = 2,
    decode_tp: Annotated[int, typer.Option(min=1, max=64, help="Ranks of each.")] = 2,
    faults: Annotated[
        Path | None,
        typer.Option("--faults", metavar="FILE", help="What goes wrong when, as in configs/replay."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write the plot to this file.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file as JSON.")
    ] = None,
) -> None:
    """Replay the requests of a recorded trace between simulated engines, and see what became of each."""
    from coordinator.replay import command

    options = command.ReplayOptions(
        trace_path=trace,
        first_s=first,
        speed=speed,
        backend=backend.value,
        layout=layout,
        scale_bytes=scale,
        prefill_groups=prefill_groups,
        prefill_tp=prefill_tp,
        decode_groups=decode_groups,
        decode_tp=decode_tp,
        faults_path=faults,
        json_path=json,
        png_path=png,
    )
    raise typer.Exit(command.run(options))


@app.command(epilog="Exit codes: 0 shown; 2 these engines cannot hand over to one another.")
def plan(
    *,
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help="A model by name, or a .toml file.")],
    prefill_tp: Annotated[int, typer.Option(min=1, max=1024, help="TP ranks in each stage of prefill.")] = 1,
    prefill_pp: Annotated[
        int | None, typer.Option(min=1, max=64, help="Pipeline stages of prefill, if not as the layout says.")
    ] = None,
    decode: Annotated[
        str, typer.Option(metavar="LAYOUT", help="The same for decode; left out: as prefill.")
    ] = "",
    decode_tp: Annotated[int, typer.Option(min=1, max=1024, help="TP ranks in each stage of decode.")] = 1,
    decode_pp: Annotated[int | None, typer.Option(min=1, max=64, help="The same for decode.")] = None,
    tokens: Annotated[int, typer.Option(min=1, max=2**31, help="Tokens in the prompt.")] = 8192,
) -> None:
    """Show what a handoff between two engines amounts to: legs, bytes, descriptors; or why there is none."""
    from rich.console import Console

    from coordinator import presets, sizing_display
    from coordinator.sizing import Side

    source = Side.of(presets.load(prefill, prefill_pp), prefill_tp)
    target = Side.of(presets.load(decode or prefill, decode_pp), decode_tp)
    raise typer.Exit(OK if sizing_display.show(Console(), source, target, tokens) else UNUSABLE)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"kv-coordinator {__version__}")


operate.register(app)


def main() -> None:
    """Run the command line; errors of ours are sentences on stderr, not tracebacks."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(problem, err=True)
        sys.exit(UNUSABLE)
    except NoAnswerError as error:
        typer.echo(f"kv-coordinator: {error}", err=True)
        sys.exit(NO_ANSWER)
    except (BackendError, CoordinatorError) as error:
        typer.echo(f"kv-coordinator: {error}", err=True)
        sys.exit(FAILED)


def _configuration(path: Path | None) -> Config:
    from coordinator.config import Config, load

    return Config() if path is None else load(path)


def _check_options(config: Config, name: str) -> list[str]:
    """Have the backend look at its own options; a line that says so where it is not installed here.

    Raises:
        ConfigError: it refuses them.

    """
    backend, options = config.backend.name, config.backend.chosen_options
    # Else nothing of a backend is loaded here; only workers use it.
    if not options:
        return []
    from backends import registry

    try:
        chosen = registry.load(backend)
    except BackendUnavailableError as error:
        return [f"options      not checked: {error}"]
    try:
        chosen("check", options)
    except BackendError as error:
        raise ConfigError([f"{name}: backend.options.{backend}: {error}"]) from error
    return []


def _summary(config: Config) -> list[str]:
    """Say in a few lines what a coordinator with this configuration does."""
    bounds = config.handoff
    secured = "CURVE keys" if config.security else "none: only this host can connect"
    return [
        f"listens on   {', '.join(config.listen.control)}",
        f"broadcasts   {', '.join(config.listen.outcomes)}",
        f"backend      {config.backend.name}, {_mover(config)}",
        f"deadline     {bounds.deadline_s:g} s after prefill; extended by decode, {bounds.hard_cap_s:g} s",
        f"security     {secured}",
    ]


def _mover(config: Config) -> str:
    """Say who moves the pages."""
    from coordinator.messages import EXTERNAL

    by_itself = config.backend.name == EXTERNAL
    return "the engine moves the pages by itself" if by_itself else f"hosted by the {config.backend.hosting}"
