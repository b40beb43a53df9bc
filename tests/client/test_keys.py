"""CURVE keys, for coordinators on other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq.auth

from coordinator.client import ClientSettings, KVPool, PrefillRank
from coordinator.errors import ConfigError, NotReadyError
from tests.client.peer import LAYOUT

if TYPE_CHECKING:
    from tests.support.processes import Programs

CONFIG = """
[listen]
control = ["tcp://127.0.0.1:0"]
outcomes = ["tcp://127.0.0.1:0"]
[http]
address = ""
[backend]
name = "loopback"
[security]
server_key = "{directory}/server.key_secret"
client_keys = "{directory}/clients"
"""


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys; the files of the public and of the secret one."""
    public, secret = map(Path, zmq.auth.create_certificates(directory, name))
    secret.chmod(0o600)
    return public, secret


def test_a_rank_with_a_known_key_is_let_in_and_no_other(programs: Programs, short_dir: Path) -> None:
    (short_dir / "clients").mkdir()
    server, _ = make_keys(short_dir, "server")
    _, known_key = make_keys(short_dir / "clients", "known")
    _, strange_key = make_keys(short_dir, "stranger")
    (short_dir / "config.toml").write_text(CONFIG.format(directory=short_dir))
    coordinator = programs.python("-m", "coordinator", "serve", "--config", str(short_dir / "config.toml"))
    coordinator.says("coordinator.ready")
    address = coordinator.output().partition('"control":["')[2].partition('"')[0]

    def connect(settings: ClientSettings) -> PrefillRank:
        return PrefillRank.connect(address, group="p", rank=0, world_size=1, pool=pool, settings=settings)

    known = ClientSettings(server_key=server, client_key=known_key)
    stranger = ClientSettings(server_key=server, client_key=strange_key)
    with KVPool.allocate(LAYOUT, 4) as pool:
        for settings in (ClientSettings(), stranger):
            with connect(settings) as rank, pytest.raises(NotReadyError, match="no coordinator at tcp"):
                rank.wait_ready(0.5)
        with connect(known) as rank:
            rank.wait_ready(10)


def test_keys_that_cannot_be_used_are_refused_at_once(short_dir: Path) -> None:
    public, secret = make_keys(short_dir, "ours")
    with pytest.raises(ConfigError, match="only one is given"):
        ClientSettings(server_key=public)
    with KVPool.allocate(LAYOUT, 4) as pool:

        def connect(server_key: Path, client_key: Path) -> None:
            PrefillRank.connect(
                "tcp://127.0.0.1:1",
                group="p",
                rank=0,
                world_size=1,
                pool=pool,
                settings=ClientSettings(server_key=server_key, client_key=client_key),
            ).close()

        with pytest.raises(ConfigError, match="holds no secret key"):
            connect(public, public)
        with pytest.raises(ConfigError, match=r"server_key, client_key: .*nowhere"):
            connect(short_dir / "nowhere", secret)
        secret.chmod(0o644)
        with pytest.raises(ConfigError, match="can be read by others"):
            connect(public, secret)
