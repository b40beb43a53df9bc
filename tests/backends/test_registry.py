"""Backends are found by name, loaded only then, and what is missing is said."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from backends import registry
from backends.base import Backend, BackendUnavailableError
from backends.loopback import LoopbackBackend
from tests.backends.rigs import ROOT

HEAVY = ("numpy", "torch", "nixl", "nixl_cu12", "nixl_cu13", "mooncake")


def test_a_backend_is_loaded_by_name() -> None:
    assert registry.load("loopback") is LoopbackBackend
    assert {"loopback", "mooncake", "nixl"} <= set(registry.names())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"no backend named 'lopback'.*loopback.*mooncake.*nixl"
    ):
        registry.load("lopback")


def test_a_missing_library_is_told_from_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILTIN, "fast", "backends.no_such_module:Fast")
    with pytest.raises(
        BackendUnavailableError, match=r"'fast' is known .* cannot be loaded: No module named"
    ):
        registry.load("fast")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_an_engine_without_its_wheel_says_what_to_install(name: str) -> None:
    """Nothing of the wheels can be imported in that process."""
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('mooncake', 'nixl', 'nixl_cu12', 'nixl_cu13')))\n"
        "from backends.registry import load\n"
        "from backends.base import BackendUnavailableError\n"
        "try:\n    load(sys.argv[1])\nexcept BackendUnavailableError as error:\n    print(error)\n"
    )
    printed = subprocess.check_output([sys.executable, "-c", program, name], cwd=ROOT, text=True)
    assert f"{name!r} is known" in printed
    assert f"pip install 'kv-coordinator[{name}]'" in printed


def test_backends_of_others_come_from_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(LoopbackBackend):
        name = "theirs"

    module = ModuleType("their_package")
    vars(module).update(Theirs=Theirs, NotOne=dict)
    monkeypatch.setitem(sys.modules, "their_package", module)
    group = registry.ENTRY_POINT_GROUP
    points = EntryPoints(
        EntryPoint(name, value, group)
        for name, value in {
            "theirs": "their_package:Theirs",
            "not-one": "their_package:NotOne",
            "gone": "their_package:Gone",
            "loopback": "their_package:Theirs",
        }.items()
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))

    assert registry.load("theirs") is Theirs
    assert "theirs" in registry.names()
    with pytest.raises(BackendUnavailableError, match=r"not a subclass of backends\.base\.Backend"):
        registry.load("not-one")
    with pytest.raises(BackendUnavailableError, match="'gone' is known"):
        registry.load("gone")
    assert registry.load("loopback") is LoopbackBackend, "ours cannot be replaced unnoticed"


def test_contract_and_registry_import_nothing_heavy() -> None:
    """A process that only looks must stay light: neither numpy nor an engine, not even by ``names``."""
    program = (
        "import sys, backends.base, backends.registry, backends.memory\n"
        "backends.registry.names()\n"
        f"print([name for name in sys.modules if name.split('.')[0] in {HEAVY}])"
    )
    printed = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert printed == "[]\n"


def test_what_is_loaded_is_a_backend() -> None:
    assert issubclass(registry.load("loopback"), Backend)
