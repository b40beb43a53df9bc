"""The configuration for NIXL says what NIXL takes, also where it is commented out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends import registry
from backends.base import BackendError, BackendUnavailableError
from coordinator.config import load, parse

TEXT = (Path(__file__).parents[2] / "configs" / "nixl.toml").read_text()


@pytest.mark.nixl
def test_its_options_are_those_of_the_backend() -> None:
    try:
        backend = registry.load("nixl")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    options = parse(TEXT).backend.chosen_options
    backend("agent", options)
    with pytest.raises(BackendError):
        backend("agent", {**options, "no_such_option": 1})


def test_the_part_for_several_hosts_can_be_used_once_there_are_keys(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    key = tmp_path / "server.key_secret"
    key.touch(mode=0o600)
    # Uncomment the keys and the table, then drop the first, local, set of addresses.
    text = re.sub(r"^# (\w+ = |\[security\])", r"\1", TEXT, flags=re.MULTILINE)
    text = re.sub(r"^(control|outcomes) = \[[^,]*\]\n", "", text, flags=re.MULTILINE)
    text = text.replace("/etc/kv-coordinator", str(tmp_path))
    path = tmp_path / "several.toml"
    path.write_text(text)
    config = load(path)
    assert config.listen.control == ("ipc:///run/kv-coordinator/control", "tcp://0.0.0.0:7700")
    assert config.listen.advertise == "prefill-node.example"
    assert config.security is not None


def test_the_engine_gives_up_on_a_peer_before_the_coordinator_does() -> None:
    config = parse(TEXT)
    options = config.backend.chosen_options
    assert float(str(options["connect_timeout_s"])) <= config.peer.connect_s
    assert float(str(options["tcp_user_timeout_s"])) < config.handoff.stall_s
