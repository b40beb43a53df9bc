"""The configurations for NIXL and Mooncake say what these take, also where it is commented out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from backends import registry
from backends.base import BackendError, BackendUnavailableError
from coordinator.config import load, parse

CONFIGS: Final = Path(__file__).parents[2] / "configs"
TEXTS: Final = {name: (CONFIGS / f"{name}.toml").read_text() for name in ("mooncake", "nixl")}
#: The option that bounds a peer that takes nothing.
PEER_TIMEOUTS: Final = {"mooncake": "peer_timeout_s", "nixl": "tcp_user_timeout_s"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mooncake", marks=pytest.mark.mooncake),
        pytest.param("nixl", marks=pytest.mark.nixl),
    ],
)
def test_its_options_are_those_of_the_backend(name: str) -> None:
    try:
        backend = registry.load(name)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    options = parse(TEXTS[name]).backend.chosen_options
    backend("agent", options)
    with pytest.raises(BackendError):
        backend("agent", {**options, "no_such_option": 1})


@pytest.mark.parametrize("name", TEXTS)
def test_the_part_for_several_hosts_can_be_used_once_there_are_keys(name: str, tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    key = tmp_path / "server.key_secret"
    key.touch(mode=0o600)
    # Uncomment the keys and the table, then drop the first, local, set of addresses.
    text = re.sub(r"^# (\w+ = |\[security\])", r"\1", TEXTS[name], flags=re.MULTILINE)
    text = re.sub(r"^(control|outcomes) = \[[^,]*\]\n", "", text, flags=re.MULTILINE)
    text = text.replace("/etc/kv-coordinator", str(tmp_path))
    path = tmp_path / "several.toml"
    path.write_text(text)
    config = load(path)
    assert config.listen.control == ("ipc:///run/kv-coordinator/control", "tcp://0.0.0.0:7700")
    assert config.listen.advertise == "prefill-node.example"
    assert config.security is not None


@pytest.mark.parametrize("name", TEXTS)
def test_the_engine_gives_up_on_a_peer_before_the_coordinator_does(name: str) -> None:
    config = parse(TEXTS[name])
    options = config.backend.chosen_options
    assert float(str(options["connect_timeout_s"])) <= config.peer.connect_s
    assert float(str(options[PEER_TIMEOUTS[name]])) < config.handoff.stall_s
