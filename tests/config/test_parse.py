"""A configuration is read exactly, or refused with every mistake named (case C56)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from coordinator.config import MAX_FILE_BYTES, Config, HandoffBounds, load, parse
from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIGS = Path(__file__).parents[2] / "configs"


def problems(text: str) -> list[str]:
    """Every mistake in ``text``, without the file's name."""
    with pytest.raises(ConfigError) as refused:
        parse(text, "file.toml")
    assert all(line.startswith("file.toml: ") for line in refused.value.problems)
    return [line.removeprefix("file.toml: ") for line in refused.value.problems]


def problem(text: str) -> str:
    """The one mistake in ``text``."""
    (line,) = problems(text)
    return line


def test_nothing_said_means_the_defaults() -> None:
    assert parse("") == Config()


def test_what_is_said_is_used_and_the_rest_is_default() -> None:
    config = parse('[handoff]\ndeadline_s = 60\n[log]\nlevel = "debug"\n')
    assert config.handoff == HandoffBounds(deadline_s=60.0)
    assert config.handoff.hard_cap_s == 1800
    assert config.log.level == "debug"


def test_a_configuration_never_changes() -> None:
    with pytest.raises(ValidationError):
        Config().handoff.deadline_s = 1.0


def test_the_defaults_are_those_that_are_promised() -> None:
    config = Config()
    assert config.handoff.deadline_s == 300
    assert config.handoff.hard_cap_s == 1800
    assert config.handoff.stall_s == 60
    assert config.handoff.offer_ttl_s == 600
    assert config.peer.connect_s == 60
    assert config.rank.lost_after_s == 15
    assert config.rank.reattach_s == 10
    assert config.release.settle_s == 5
    assert config.release.drain_s == 2
    assert config.backend.name == "loopback"


def test_local_toml_is_the_built_in_default() -> None:
    assert load(CONFIGS / "local.toml") == Config()


def test_local_toml_names_every_key() -> None:
    text = (CONFIGS / "local.toml").read_text()
    for key in ("unproven_s", "quarantine_bytes", "token_file", "file"):
        assert f"# {key} =" in text
        text = text.replace(f"# {key} =", f"{key} =")
    said = tomllib.loads(text)

    def keys(table: dict[str, object]) -> set[str]:
        return {f"{name}.{key}" for name, inner in table.items() if isinstance(inner, dict) for key in inner}

    def fields(model: type[BaseModel]) -> Iterator[str]:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from (f"{name}.{key}" for key in field.annotation.model_fields)

    # The options belong to the backends, the keys to a deployment that is not local, a secret into a file.
    assert keys(said) == set(fields(Config)) - {"backend.options", "http.token"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_can_be_used(path: Path) -> None:
    assert isinstance(load(path), Config)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[handoff]\ndeadline = 60",
            (
                "handoff.deadline: unknown key; did you mean 'deadline_s'? "
                "accepted here: deadline_s, hard_cap_s, stall_s, offer_ttl_s"
            ),
        ),
        (
            "[handof]\ndeadline_s = 60",
            (
                "handof: unknown key; did you mean 'handoff'? accepted here: "
                "service, listen, backend, handoff, peer, rank, release, limits, http, log, shutdown, "
                "security"
            ),
        ),
        ("handoff = 3", "handoff: is 3, must be a table of keys"),
        (
            '[handoff]\ndeadline_s = "60"',
            'handoff.deadline_s: is "60", must be a number of seconds over 0, at most 604800 (a week)',
        ),
        (
            "[handoff]\ndeadline_s = true",
            "handoff.deadline_s: is true, must be a number of seconds over 0, at most 604800 (a week)",
        ),
        (
            "[limits]\nmax_groups = 2.5",
            "limits.max_groups: is 2.5, must be a whole number from 1 to 10000000",
        ),
        ("[limits]\nmax_groups = 0", "limits.max_groups: is 0, must be a whole number from 1 to 10000000"),
        (
            "[limits]\nmax_frame_bytes = 1000",
            "limits.max_frame_bytes: is 1000, must be a whole number of bytes from 8388608 to 1073741824",
        ),
        (
            '[log]\nlevel = "loud"',
            'log.level: is "loud", must be "debug", "info", "warning" or "error"',
        ),
        (
            "[listen]\ncontrol = []",
            "listen.control: is a list of 0, must be a list of one to 16 addresses in quotes",
        ),
        (
            "[listen]\ncontrol = [3]",
            "listen.control[0]: is 3, must be a list of one to 16 addresses in quotes",
        ),
        (
            '[release]\nunproven_s = "never"',
            (
                'release.unproven_s: is "never", must be a number of seconds over 0, at most 604800 '
                "(a week); left out: never"
            ),
        ),
        (
            "[release]\nquarantine_bytes = 0",
            (
                "release.quarantine_bytes: is 0, must be a whole number of bytes, at least 1; "
                "left out: a tenth of the pools"
            ),
        ),
        (
            '[service]\nname = "a b"',
            'service.name: is "a b", must be a name in quotes, of 1 to 128 letters, digits and . _ : -',
        ),
    ],
)
def test_a_mistake_is_told_with_what_is_accepted(text: str, line: str) -> None:
    assert problem(text) == line


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "-0.001", "nan", "inf", "-inf", "604801"])
@pytest.mark.parametrize(
    "key",
    ["handoff.deadline_s", "handoff.stall_s", "handoff.offer_ttl_s", "peer.connect_s", "rank.lost_after_s"],
)
def test_no_bound_can_be_absent_in_disguise(key: str, value: str) -> None:
    """Case C04: a deadline that is 0, negative, infinite or no number at all is refused."""
    table, name = key.split(".")
    line = problem(f"[{table}]\n{name} = {value}")
    assert line.startswith(f"{key}: is ")
    assert "must be a number of seconds over 0" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("service.name", "here"),
        ("listen.advertise", "node-7"),
        ("http.address", "127.0.0.1:7780"),
        ("http.token", "0123456789abcdef"),
        ("backend.name", "loopback"),
    ],
)
def test_a_line_break_at_the_end_is_part_of_a_value(key: str, value: str) -> None:
    """It comes from a file that was pasted in; some patterns would let it pass."""
    table, name = key.split(".")
    parse(f'[{table}]\n{name} = "{value}"')
    assert problem(f'[{table}]\n{name} = "{value}\\n"').startswith(f"{key}: ")


def test_a_line_break_at_the_end_makes_no_address() -> None:
    line = problem('[listen]\ncontrol = ["tcp://127.0.0.1:1\\n"]\noutcomes = ["tcp://127.0.0.1:2"]')
    assert line.startswith("listen.control[0]: is ")


def test_all_mistakes_are_told_at_once() -> None:
    lines = problems(
        """
        [handoff]
        deadline_s = -1
        stall = 3
        [rank]
        heartbeat_s = "1"
        [backend]
        name = "nixxl"
        [listen]
        control = ["tcp://0.0.0.0:700000"]
        [no]
        """
    )
    assert sorted(line.partition(":")[0] for line in lines) == [
        "backend.name",
        "handoff.deadline_s",
        "handoff.stall",
        "listen.control[0]",
        "no",
        "rank.heartbeat_s",
    ]


def test_a_combination_is_not_judged_by_a_value_that_is_wrong_itself() -> None:
    assert problem("[handoff]\ndeadline_s = 0\nhard_cap_s = 10").startswith("handoff.deadline_s: is 0")


def test_a_missing_key_is_named() -> None:
    line = problem('[security]\nserver_key = "/etc/key"')
    assert line == "security.client_keys: is missing, must be the path of a directory, in quotes"


def test_text_that_is_no_toml_is_refused_with_the_place() -> None:
    line = problem("[handoff\n")
    assert line.startswith("is not TOML: ")
    assert "line 1" in line


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ('"handoff.deadline_s" = 100', '"handoff.deadline_s": unknown key'),
        ('[handoff]\n"a.b" = 1', 'handoff."a.b": unknown key'),
        ('[handoff]\n"deadline_s\\n" = 1', 'handoff."deadline_s\\n": unknown key'),
        ('"" = 1', '"": unknown key'),
        ('[backend.options]\n"my.be" = 1', 'backend.options."my.be": is 1, must be one table'),
        ('[backend.options."my.be"]\nx = 1', "backend.options.\"my.be\": there is no backend 'my.be'"),
        ("[[handoff]]\na = 1", "handoff: is a list of 1, must be a table of keys"),
        ('[security]\nserver_key = 1\nclient_keys = "/x"', "security.server_key: is 1, must be the path"),
        ('[security]\nserver_key = "/x\\u0000"\nclient_keys = "/x"', 'security.server_key: is "/x\\u0000"'),
        ('[security]\nserver_key = "/x"\nclient_keys = "/x\\u0000"', 'security.client_keys: is "/x\\u0000"'),
        ('[log]\nfile = "/x\\u0000y"', 'log.file: is "/x\\u0000y", must be the path of a file, in quotes'),
        ('[http]\ntoken_file = "/\\u0000"', 'http.token_file: is "/\\u0000", must be the path of a file'),
        ('[listen]\ncontrol = ["ipc:///x\\u0000y"]', "listen.control[0]: is "),
        (f"a = {'[' * 3000}", "is nested too deeply"),
        (f"a{'.a' * 3000} = 1", "is nested too deeply"),
        (f"[backend.options.loopback]\na{'.a' * 300} = 1", "is nested too deeply: more than 32 tables"),
        (
            f"[backend.options.loopback]\na = {'[' * 29}{']' * 29}",
            "is nested too deeply: more than 32 tables",
        ),
        (f"[limits]\nmax_groups = {'1' * 5000}", "is not TOML: Exceeds the limit"),
        (f"[limits]\nmax_groups = 0x{'f' * 5000}", "limits.max_groups: is 0xfff"),
        (f"[handoff]\ndeadline_s = 0x{'f' * 5000}", "handoff.deadline_s: is 0xfff"),
    ],
    ids=lambda text: text[:40],
)
def test_no_text_raises_anything_else_than_that_it_cannot_be_used(text: str, starts: str) -> None:
    assert problem(text).startswith(starts)


def test_a_backend_may_nest_its_settings_as_deeply_as_that() -> None:
    """Whatever is accepted can also be compared, written out and sent to a worker."""
    text = f"[backend.options.loopback]\na = {'[' * 28}{']' * 28}"
    config = parse(text)
    assert config == parse(text)
    options = config.model_dump(mode="json")["backend"]["options"]
    assert msgspec.json.decode(msgspec.json.encode(options)) == options


def test_a_key_in_quotes_is_not_the_one_that_its_dots_would_name() -> None:
    lines = problems('"handoff.deadline_s" = 1\n[handoff]\ndeadline_s = 100\nhard_cap_s = 99')
    assert [line.partition(": ")[0] for line in lines] == ['"handoff.deadline_s"', "handoff.deadline_s"]


def test_a_long_value_is_shortened() -> None:
    assert len(problem(f'[log]\nlevel = "{"x" * 10_000}"')) < 200


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "no.toml")
    assert refused.value.problems == [f"{tmp_path}/no.toml: cannot be read: No such file or directory"]


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('[service]\nname = "Z\xfcrich"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        load(path)
