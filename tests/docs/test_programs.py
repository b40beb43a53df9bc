"""The programs in the README run as they stand, against a real coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import zmq.auth

from coordinator.client import ClientSettings, DecodeRank, Endpoint, KVPool, Layout, RankState
from coordinator.errors import NotReadyError
from tests.docs.markdown import blocks, program, section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Program, Programs

#: What the README names and a test must not touch.
_RUN: Final = "/run/kv-coordinator"
_KEYS: Final = "/etc/kv-coordinator"
_PYTHON: Final = ".venv/bin/python"
#: Two processes that import torch, on a busy host.
_PROGRAM_S: Final = 60.0
_REFUSED_S: Final = 1.0


def moved(text: str, *moves: tuple[str, object]) -> str:
    """The text with every name replaced; each must occur."""
    for old, new in moves:
        assert old in text
        text = text.replace(old, str(new))
    return text


def serve(programs: Programs, directory: Path, configuration: str) -> Program:
    """Start a coordinator."""
    path = directory / "coordinator.toml"
    path.write_text(configuration)
    coordinator = programs.python("-m", "coordinator", "serve", "--config", str(path))
    coordinator.says("coordinator.ready")
    return coordinator


@pytest.mark.timeout(150)
def test_both_sides_of_a_handoff(programs: Programs, short_dir: Path) -> None:
    coordinator = serve(
        programs,
        short_dir,
        f'[listen]\ncontrol = ["ipc://{short_dir}/control"]\noutcomes = ["ipc://{short_dir}/outcomes"]\n'
        '[http]\naddress = ""\n',
    )
    started = {}
    for name in ("decode.py", "prefill.py"):
        path = short_dir / name
        path.write_text(moved(program(name), (_RUN, short_dir)))
        started[name] = programs.python(str(path))
    for running in started.values():
        running.says("is released", _PROGRAM_S)
        assert running.wait() == 0, running.output()

    assert said(started["prefill.py"]) == ["room 4711 has arrived", "room 4711 is released"]
    promised = "room 4711: [42, 42, 43] and b'first token'"
    assert said(started["decode.py"]) == [promised, "room 4711 is released"]
    assert f"`{promised}`" in section("Using it from an engine")
    assert told(coordinator) == shown()


def said(engine: Program) -> list[str]:
    """What an engine's program prints; on a host that stands still for a moment, its rank warns of that."""
    return [line for line in engine.output().splitlines() if "stood still" not in line]


def told(coordinator: Program) -> list[tuple[str, set[str]]]:
    """The trail of the handoff in the log: each line's event and keys, in order."""
    lines = [json.loads(line) for line in coordinator.output().splitlines() if line.startswith("{")]
    hidden = {"timestamp", "level", "attempt"}
    return [(line["event"], set(line) - hidden) for line in lines if line["event"].startswith("handoff.")]


def shown() -> list[tuple[str, set[str]]]:
    """The same, as the README shows it."""
    (trail,) = [code for code in blocks(section("When something fails")) if code.startswith("{")]
    return [(line["event"], set(line)) for line in map(json.loads, trail.splitlines())]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    layout = Layout(layers=1, page_tokens=1, kv_heads=1, head_size=8, dtype="float16")
    with ExitStack() as stack:
        pool = stack.enter_context(KVPool.allocate(layout, 4))
        yield stack.enter_context(Endpoint(pool, "loopback"))


def join(address: str, endpoint: Endpoint, settings: ClientSettings) -> DecodeRank:
    """Connect a decode rank."""
    return DecodeRank.connect(
        address, group="decode-0", rank=0, world_size=1, endpoint=endpoint, settings=settings
    )


def make_keys(directory: Path) -> ClientSettings:
    """Follow the recipe in ``directory``; returns the settings of a client."""
    (recipe,) = blocks(section("Security"), "sh")
    recipe = moved(recipe, (_KEYS, directory), (_PYTHON, sys.executable))
    subprocess.run(["/bin/sh", "-e", "-c", recipe], check=True, timeout=30)
    names: dict[str, ClientSettings] = {}
    exec(moved(program("keys.py"), (_KEYS, directory)), names)  # noqa: S102 - it is our own README
    return names["settings"]


@pytest.mark.timeout(150)
def test_the_recipe_for_keys_lets_in_who_has_one_and_nobody_else(
    programs: Programs, short_dir: Path, endpoint: Endpoint
) -> None:
    settings = make_keys(short_dir / "keys")
    (configuration,) = blocks(section("Security"), "toml")
    configuration = moved(
        configuration,
        (_RUN, short_dir),
        (_KEYS, short_dir / "keys"),
        ("0.0.0.0:7700", "127.0.0.1:0"),
        ("0.0.0.0:7701", "127.0.0.1:0"),
    )
    coordinator = serve(programs, short_dir, configuration)
    ready = json.loads(coordinator.output().splitlines()[0])
    assert [address.partition(":")[0] for address in ready["control"]] == ["ipc", "tcp"]

    strange = Path(tempfile.mkdtemp(dir=short_dir))
    _, secret = zmq.auth.create_certificates(strange, "stranger")
    Path(secret).chmod(0o600)
    stranger = ClientSettings(server_key=settings.server_key, client_key=Path(secret))
    for address in ready["control"]:
        with join(address, endpoint, settings) as rank:
            rank.wait_ready(_PROGRAM_S)
    for refused in (ClientSettings(), stranger):
        with join(ready["control"][-1], endpoint, refused) as rank:
            with pytest.raises(NotReadyError):
                rank.wait_ready(_REFUSED_S)
            assert rank.state is RankState.CONNECTING


def test_the_secret_keys_are_for_their_owner_alone(short_dir: Path) -> None:
    settings = make_keys(short_dir / "keys")
    secrets = sorted((short_dir / "keys").rglob("*.key_secret"))
    assert [path.stem for path in secrets] == ["decode-0", "prefill-0", "server"]
    assert {path.stat().st_mode & 0o077 for path in secrets} == {0}
    assert settings.client_key in secrets
    assert settings.server_key not in secrets
    public = sorted(path.name for path in (short_dir / "keys" / "clients").iterdir())
    assert public == ["decode-0.key", "prefill-0.key"]
