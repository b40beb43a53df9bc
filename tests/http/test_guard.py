"""Who may come in, and what an error is answered with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.actions import Actions
from coordinator.config import Config, Http, parse
from coordinator.errors import ConfigError
from coordinator.http.routes import TABLE
from coordinator.http.server import HttpServer
from coordinator.reload import Reload
from coordinator.service import Service
from tests.http.served import served
from tests.support.logs import capture

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.http.routes import Route

TOKEN = "s" * 16 + "ecret"


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse(text, "f")
    return refused.value.problems


@pytest.mark.parametrize("address", ["0.0.0.0:7780", "[::]:7780", "10.0.0.1:7780", "node-7:7780"])
def test_an_address_for_other_hosts_without_a_token_is_refused(address: str) -> None:
    """Case C56."""
    (line,) = problems(f'[http]\naddress = "{address}"')
    assert line.startswith("f: http.address: can be reached from other hosts")
    assert "http.token_file" in line
    assert parse(f'[http]\naddress = "{address}"\ntoken = "{TOKEN}"').http.token == TOKEN


@pytest.mark.parametrize("address", ["127.0.0.1:7780", "localhost:7780", "[::1]:7780", ""])
def test_a_local_address_needs_none(address: str) -> None:
    assert parse(f'[http]\naddress = "{address}"').http.address == address


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ('address = "127.0.0.1"', "f: http.address: is"),
        ('address = "127.0.0.1:99999"', "f: http.address: is"),
        ('token = "short"', "f: http.token: is"),
        ('token_file = "/nowhere"', "f: http.token_file: '/nowhere' cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, starts: str) -> None:
    """Case C56."""
    (line,) = problems(f"[http]\n{text}")
    assert line.startswith(starts)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    (line,) = problems(f'[http]\ntoken_file = "{file}"')
    assert "can be read by others (mode 644)" in line
    file.chmod(0o640)
    parse(f'[http]\ntoken_file = "{file}"')
    file.chmod(0o600)
    parse(f'[http]\ntoken_file = "{file}"')
    (line,) = problems(f'[http]\ntoken_file = "{file}"\ntoken = "{TOKEN}"')
    assert "cannot stand beside http.token" in line


async def test_what_changes_something_needs_the_token_and_looking_does_not(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    async with served(token_file=str(file)) as it:
        for credentials in ("", "Bearer wrong", f"Basic {TOKEN}"):
            answer = await it.call("POST", "/v1/drain", 401, Authorization=credentials)
            assert answer == {"error": "needs the token: Authorization: Bearer TOKEN"}
        assert (await it.get("/v1/status"))["draining"] is False
        await it.call("POST", "/v1/drain", 200, Authorization=f"Bearer {TOKEN}")
        assert (await it.get("/v1/status"))["draining"] is True


async def test_a_file_with_too_short_a_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    service = Service(Config())
    actions = Actions(service.rooms, Reload(None, service))
    with pytest.raises(ConfigError, match="at least 16 characters"):
        HttpServer(Http(token_file=file), service.overview, actions)
    await service.stop()


async def test_another_page_in_an_operators_browser_can_do_nothing_here() -> None:
    async with served() as it:
        await it.call("POST", "/v1/drain", 403, Origin="http://evil.example")
        await it.call("GET", "/v1/status", 403, Host="evil.example")
        await it.call("GET", "/v1/status", 403, Host="e v i l")
        assert not it.stage.service.rooms.draining
        await it.call("POST", "/v1/drain", 200, Origin=it.server.url)
        await it.call("GET", "/v1/status", 200, Host="localhost:80")


async def test_what_is_not_there_or_not_possible_is_said() -> None:
    async with served() as it:
        assert (await it.get("/v1/nope", 404))["error"] == "GET /v1/nope: Not Found"
        assert (await it.get("/v1/drain", 405))["error"] == "GET /v1/drain: Method Not Allowed"
        assert (await it.get("/v1/status?x=1", 400))["error"] == (
            "unknown parameter 'x'; accepted here: none"
        )
        await it.call("POST", "/v1/handoffs/1/cancel", 413, data=b"x" * 100_000)


@pytest.mark.parametrize("route", TABLE, ids=lambda route: f"{route.method} {route.path}")
async def test_a_parameter_that_is_not_known_is_refused_wherever_it_stands(route: Route) -> None:
    """Else a mistyped filter would answer for everything, and a mistyped question do something."""
    async with served() as it:
        path = route.path.replace("{room}", "1")
        found = await it.call(route.method, f"{path}?nonsense=1", 400)
        assert "unknown parameter 'nonsense'" in found["error"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("limit=1", 200), ("limit=0", 400), ("limit=-1", 400), ("limit=%C2%B2", 400), ("limit=%D9%A3", 400),
        ("older_s=0", 200), ("older_s=-0.1", 400), ("older_s=inf", 400), ("older_s=nan", 400),
    ],
)  # fmt: skip
async def test_a_number_is_what_it_must_be_up_to_its_bounds(query: str, status: int) -> None:
    async with served() as it:
        await it.call("GET", f"/v1/handoffs?{query}", status)


async def test_a_bug_costs_one_answer_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as it:
        monkeypatch.setattr(it.stage.service.overview, "ranks", None)
        with capture("error") as log:
            answer = await it.get("/metrics", 500)
        assert "a bug in the coordinator: TypeError" in answer["error"]
        assert log.events == ["http.broken"]
        assert it.stage.service.counters.bugs == 1
        await it.get("/healthz")


async def test_an_address_that_is_taken_is_refused_with_a_sentence() -> None:
    async with served() as first:
        port = first.server.url.rpartition(":")[2]
        with pytest.raises(ConfigError, match=rf"http.address: cannot listen on 127.0.0.1:{port}: "):
            async with served(address=f"127.0.0.1:{port}"):
                pass
