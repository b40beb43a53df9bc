"""When the SGLang plugin does nothing: shown with stand-ins for SGLang, which is not installed here."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any, cast

import pytest

from coordinator.integrations.sglang import plugin
from coordinator.integrations.sglang.carrier import RID, Carrier
from coordinator.integrations.sglang.hooks import Hooks
from coordinator.integrations.sglang.settings import PluginSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.integrations.sglang.link import Link


class Registry:
    """Notes what is hooked."""

    def __init__(self) -> None:
        self.hooked: dict[str, str] = {}
        self._patched: set[str] = set()

    def register(self, target: str, _hook: Callable[..., object], kind: str) -> None:
        """Note it."""
        self.hooked[target] = kind


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A process with a scheduler of the right SGLang in it, and the plugin's settings."""
    registry = Registry()
    states = {"Failed": 0, "Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3, "Success": 4}
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": plugin.VERSIONS[0]},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.scheduler": {},
        "sglang.srt.disaggregation": {},
        "sglang.srt.disaggregation.base": {},
        "sglang.srt.disaggregation.base.conn": {"KVPoll": types.SimpleNamespace(**states)},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": {"AROUND": "around", "AFTER": "after"},
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("KV_COORDINATOR", "ipc:///run/kv-coordinator/control")
    return registry


def test_it_hooks_a_scheduler_of_the_right_version(registry: Registry) -> None:
    assert plugin.register() is not None
    assert set(registry.hooked) == set(plugin.TARGETS)


def test_it_does_nothing_without_an_address(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_COORDINATOR")
    assert plugin.register() is None
    assert not registry.hooked


def test_it_does_nothing_in_a_process_without_a_scheduler(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    assert plugin.register() is None
    assert not registry.hooked


def test_it_refuses_another_version(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.99", raising=False)
    assert plugin.register() is None
    assert not registry.hooked
    assert "this is SGLang 0.5.99, and this version of kv-coordinator was made for 0.5.23" in caplog.text


def test_it_refuses_other_states(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["sglang.srt.disaggregation.base.conn"].KVPoll, "Failed", 7)
    assert plugin.register() is None
    assert not registry.hooked
    assert "numbers the states of its senders in another way" in caplog.text


def test_it_does_nothing_when_a_hook_was_not_applied(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang only logs that by itself; a rank that is hooked by half would hang its engine."""
    hooks = plugin.register()
    assert hooks is not None
    poll = next(target for target in plugin.TARGETS if "poll_and" in target)
    registry._patched = set(plugin.TARGETS) - {poll}
    manager = types.SimpleNamespace(disaggregation_mode=types.SimpleNamespace(value="prefill"))
    hooks.manager_made(None, manager)
    assert hooks.link is None
    assert f"did not apply the hooks on {poll}" in caplog.text


@pytest.mark.parametrize(
    ("stages", "tells", "why"),
    [(2, True, "2 pipeline stages"), (1, False, "cannot tell when a transfer has ended")],
)
def test_it_does_nothing_for_an_engine_that_it_cannot_serve(
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
    stages: int,
    tells: bool,  # noqa: FBT001 - a parameter of the test
    why: str,
) -> None:
    hooks = plugin.register()
    assert hooks is not None
    registry._patched = set(plugin.TARGETS)
    mode = types.SimpleNamespace(value="prefill")
    manager = types.SimpleNamespace(
        disaggregation_mode=mode, pp_size=stages, supports_deferred_decode_kv_release=tells
    )
    hooks.manager_made(None, manager)
    assert hooks.link is None
    assert why in caplog.text


def test_half_a_pair_of_keys_is_told(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KV_COORDINATOR_SERVER_KEY", "/keys/server.key")
    assert plugin.register() is None
    assert not registry.hooked
    assert "server_key, client_key: only one is given" in caplog.text


def test_the_settings_are_read_from_the_environment() -> None:
    settings = PluginSettings.read({"KV_COORDINATOR": "ipc:///x", "KV_COORDINATOR_GROUP": "north"})
    assert (settings.address, settings.prefix) == ("ipc:///x", "north")
    assert PluginSettings.read({}).address == ""


def test_a_carrier_travels_as_the_message_of_an_abort() -> None:
    for carrier in (Carrier(on=True, token=bytes(range(17))), Carrier(on=False, token=b"")):
        assert Carrier.read(carrier.text()) == carrier
    for other in (
        "",
        None,
        ["0"],
        "x",
        "2",
        "0zz",
        "100",
        "1" + "00" * 16,
        "1" + "00" * 18,
        "Abort in queue",
    ):
        assert Carrier.read(other) is None


class AbortReq(types.SimpleNamespace):
    """As SGLang's."""


@pytest.mark.parametrize("text", ["", "zz", "100", "1" + "ff" * 16 + "00", "0", "1" + "00" * 17])
@pytest.mark.parametrize("separator", ["", ":"])
def test_the_id_that_a_client_has_chosen_for_its_request_says_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str, separator: str
) -> None:
    """SGLang takes any text for an id, and an abort of that request carries it, too."""
    module = types.SimpleNamespace(AbortReq=AbortReq)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", cast("types.ModuleType", module))
    applied: list[Carrier] = []
    hooks = Hooks(cast("PluginSettings", None), lambda: "")
    hooks.link = cast("Link", types.SimpleNamespace(leads=False, apply=applied.append))
    rid = RID + separator + text
    generate = types.SimpleNamespace(rid=rid)
    also_generate = types.SimpleNamespace(rid=rid, abort_message=text)
    aborts = [AbortReq(rid=rid, abort_message=None), AbortReq(rid=f"{rid}-1", abort_message=text)]
    received = [generate, also_generate, *aborts]
    assert hooks.receive(lambda _receiver, _local: list(received), object()) == received
    assert applied == []

    carrier = Carrier(on=True, token=bytes(range(17)))
    ours = AbortReq(rid=RID, abort_message=carrier.text())
    assert hooks.receive(lambda _receiver, _local: [generate, ours, *aborts], object()) == [generate, *aborts]
    assert applied == [carrier]


def test_importing_the_plugin_imports_neither_sglang_nor_torch() -> None:
    """SGLang loads it in every process, also where it is not used."""
    program = (
        "import sys; import coordinator.integrations.sglang.plugin as plugin; plugin.register();"
        "print([name for name in ('sglang', 'torch') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"
