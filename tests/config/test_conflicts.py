"""Settings that are fine by themselves and cannot work together are refused (case C56)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.config import Backend, Config, parse
from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SECURITY = '[security]\nserver_key = "{0}/key"\nclient_keys = "{0}/clients"\n'


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with a server key and client keys."""
    (tmp_path / "clients").mkdir()
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    return tmp_path


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse(text, "f")
    return [line.removeprefix("f: ") for line in refused.value.problems]


def listen(control: str, outcomes: str, more: str = "") -> str:
    return f"[listen]\ncontrol = {control}\noutcomes = {outcomes}\n{more}\n"


def test_one_token_is_enough(keys: Path) -> None:
    """An operator who changes the one that is not used would believe the old one gone."""
    said = problems(f'[http]\ntoken = "0123456789abcdef"\ntoken_file = "{keys}/key"')
    assert said == ["http.token_file: cannot stand beside http.token: only one of them is used"]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("[handoff]\ndeadline_s = 100\nhard_cap_s = 99", "handoff.deadline_s: is 100, must not be over"),
        (
            "[rank]\nlost_after_s = 2.9",
            "rank.lost_after_s: is 2.9, must be at least 3 times rank.heartbeat_s (1)",
        ),
        (
            "[rank]\nheartbeat_s = 6",
            "rank.lost_after_s: is 15, must be at least 3 times rank.heartbeat_s (6)",
        ),
        (
            "[release]\nunproven_s = 4",
            "release.unproven_s: is 4, must be at least release.settle_s (5)",
        ),
        ("[rank]\nreattach_s = 0.5", "rank.reattach_s: is 0.5, must be at least rank.heartbeat_s (1)"),
        ("[handoff]\noffer_ttl_s = 9", "handoff.offer_ttl_s: is 9, must be at least rank.reattach_s (10)"),
        (
            '[backend]\nname = "nixxl"',
            "backend.name: there is no backend 'nixxl'; did you mean 'nixl'? installed: ",
        ),
        ("[backend.options.zzz]\na = 1", "backend.options.zzz: there is no backend 'zzz'; installed: "),
        (
            "[backend.options.external]\na = 1",
            "backend.options.external: has no options: the engine moves the pages by itself",
        ),
    ],
)
def test_an_impossible_combination_is_refused(text: str, starts: str) -> None:
    (line,) = problems(text)
    assert line.startswith(starts)


def test_a_bound_may_equal_the_other() -> None:
    assert (
        parse("[handoff]\ndeadline_s = 60\nhard_cap_s = 60\n[rank]\nlost_after_s = 3").rank.lost_after_s == 3
    )


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1",
        "ipc://relative/path",
        "ipc:///run/x/",
        "ipc://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:65536",
        "tcp://::1:7700",
        "tcp://:7700",
        "inproc://control",
        "7700",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    (line,) = problems(listen(f'["{address}"]', '["ipc:///run/x/outcomes", "tcp://127.0.0.1:1"]'))
    assert line.startswith(f"listen.control[0]: is {address!r}, must be ")


def test_a_socket_path_must_fit_into_the_kernels_structure() -> None:
    directory = "/run/" + "d" * 96
    assert len(directory) + len("/12345") == 107
    fits = parse(listen(f'["ipc://{directory}/12345"]', '["ipc:///run/o"]'))
    assert len(fits.listen.control[0]) == len("ipc://") + 107
    (line,) = problems(listen(f'["ipc://{directory}/123456"]', '["ipc:///run/o"]'))
    assert line.startswith("listen.control[0]: is a path of 108 bytes, must be at most 107: ")


def test_a_path_is_measured_in_bytes() -> None:
    (line,) = problems(listen(f'["ipc:///{"ü" * 60}"]', '["ipc:///run/o"]'))
    assert "a path of 121 bytes" in line


@pytest.mark.parametrize("host", ["10.1.2.3", "node7", "[2001:db8::1]", "192.168.0.1"])
def test_other_hosts_are_let_in_only_with_keys(host: str, keys: Path) -> None:
    text = listen(f'["tcp://{host}:7700"]', '["tcp://127.0.0.1:7701"]')
    (line,) = problems(text)
    assert line.startswith(
        f"listen.control[0]: can be reached from other hosts ({host}): set security.server_key"
    )
    assert parse(text + SECURITY.format(keys)).security is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_this_host_needs_no_keys(host: str) -> None:
    assert parse(listen(f'["tcp://{host}:7700"]', f'["tcp://{host}:7701"]')).security is None


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])  # noqa: S104 - nothing is bound
def test_every_interface_needs_a_name_to_be_found_under(host: str, keys: Path) -> None:
    """Case C33: what listens everywhere must say which address peers use."""
    text = listen(f'["tcp://{host}:7700"]', '["tcp://127.0.0.1:7701"]')
    (line,) = problems(text + SECURITY.format(keys))
    assert line.startswith("listen.control[0]: is on every interface")
    named = listen(f'["tcp://{host}:7700"]', '["tcp://127.0.0.1:7701"]', 'advertise = "node7"')
    assert parse(named + SECURITY.format(keys)).listen.advertise == "node7"


def test_who_comes_by_tcp_must_be_able_to_subscribe_by_tcp() -> None:
    (line,) = problems(listen('["ipc:///run/c", "tcp://127.0.0.1:7700"]', '["ipc:///run/o"]'))
    assert line.startswith(
        "listen.outcomes: has no tcp address, but listen.control[1] is tcp://127.0.0.1:7700"
    )


def test_one_address_is_used_once() -> None:
    (line,) = problems(listen('["ipc:///run/a"]', '["ipc:///run/a"]'))
    assert line == "listen.outcomes[0]: is the same address as listen.control[0]; each needs its own"


def test_one_port_is_not_listened_on_twice_and_two_are_two_addresses() -> None:
    one, other = '["tcp://127.0.0.1:7000"]', '["tcp://127.0.0.1:7001"]'
    (line,) = problems(listen(one, one))
    assert line == "listen.outcomes[0]: is the same address as listen.control[0]; each needs its own"
    parse(listen(one, other), "f")


def test_any_free_port_may_be_asked_for_twice() -> None:
    config = parse(listen('["tcp://127.0.0.1:0"]', '["tcp://127.0.0.1:0"]'))
    assert config.listen.control == config.listen.outcomes


def test_a_key_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "key").chmod(0o640)
    (line,) = problems(SECURITY.format(keys))
    assert line.startswith("security.server_key: ")
    assert "can be read by others (mode 640)" in line


def test_keys_must_be_there(tmp_path: Path) -> None:
    lines = problems(SECURITY.format(tmp_path))
    assert [line.partition(":")[0] for line in lines] == ["security.server_key", "security.client_keys"]
    assert "No such file or directory" in lines[0]


def test_options_are_those_of_the_chosen_backend() -> None:
    options: dict[str, dict[str, object]] = {"loopback": {"control": "/run/faults"}, "nixl": {"a": 1}}
    assert Backend(name="loopback", options=options).chosen_options == {"control": "/run/faults"}
    assert Config().backend.chosen_options == {}


def test_both_hostings_are_accepted_and_no_other() -> None:
    assert parse('[backend]\nhosting = "rank"').backend.hosting == "rank"
    assert parse("").backend.hosting == "coordinator"
    with pytest.raises(ConfigError, match=r'backend\.hosting: .*must be "coordinator" or "rank"'):
        parse('[backend]\nhosting = "hotel"')
