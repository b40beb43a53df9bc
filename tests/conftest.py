"""What every test gets: the event loops, short paths, and the proof that nothing is left behind."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import leftovers
from tests.support.processes import Programs
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xdist.remote import Producer

_SLOW_START = "tests/sglang/"

# No example fails because it took long: hosts are shared, and stand still for seconds.
settings.register_profile(
    "shared host", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared host")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say how long to look for trouble."""
    parser.addoption("--chaos-seeds", type=int, default=50, metavar="N", help="storms of tests/faults")
    parser.addoption("--vllm", action="store_true", help="the tests with real vLLM engines, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that start vLLM out, or all others."""
    kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kinds[item.get_closest_marker("vllm") is not None].append(item)
    wanted = bool(config.getoption("--vllm"))
    config.hook.pytest_deselected(items=kinds[not wanted])
    items[:] = kinds[wanted]


def pytest_collection(session: pytest.Session) -> None:
    """Compile a share of all test modules, where several processes are about to compile each of them.

    They all collect all tests, so each would rewrite all assertions. Now it finds what the others have done.
    """
    config = session.config
    me = getattr(config, "workerinput", None)
    if me is None or config.args != config.getini("testpaths"):
        return
    number = int(me["workerid"].removeprefix("gw"))
    modules = sorted((config.rootpath / "tests").rglob("test_*.py"))
    for path in modules[number :: me["workercount"]]:
        importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out, and how to get it."""
    if config.getoption("--vllm"):
        return "only the tests with real vLLM engines are run"
    return "the tests with real vLLM engines are left out, which take long; --vllm runs them"


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Give a process that asks for work the next test; those with SGLang all to one, for it starts slowly."""

    def _split_scope(self, nodeid: str) -> str:
        """Name the unit of work of a test."""
        return _SLOW_START if nodeid.startswith(_SLOW_START) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Share the tests out."""
    return Scheduling(config, log)


def pytest_configure() -> None:
    """Have no current event loop: asked for one, asyncio would make one that nobody closes."""
    asyncio.set_event_loop(None)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on the standard loop and on uvloop, unless it is marked for one of them.

    Virtual time (``@pytest.mark.looptime``) does nothing on uvloop, silently: it gets the standard loop.
    """
    standard = {"standard": asyncio.new_event_loop}
    fast = {"uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("looptime") or item.get_closest_marker("standard_loop"):
        return standard
    if item.get_closest_marker("uvloop"):
        return fast
    return standard | fast


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run when it leaves a process, a pool in shared memory or a socket file behind."""
    tmp_path_factory.getbasetemp()  # pytest keeps its own directories where they always are
    mark = secrets.token_hex(8)
    directory = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    before = leftovers.pools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leftovers.MARK, mark)
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", None)
        yield
    try:
        _wait_until_empty(lambda: leftovers.processes(mark), "processes")
        _wait_until_empty(lambda: leftovers.unused(leftovers.pools() - before), "pools in shared memory")
        _wait_until_empty(lambda: leftovers.sockets(directory), "socket files")
    finally:
        for process in leftovers.processes(mark):
            _kill(process)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_empty(look: Callable[[], object], what: str) -> None:
    """What was told to end a moment ago may take another one."""
    found: object = None

    def empty() -> bool:
        nonlocal found
        found = look()
        return not found

    try:
        eventually(empty, timeout_s=5.0)
    except AssertionError:
        pytest.fail(f"the tests left {what} behind: {found}", pytrace=False)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a path short enough for socket files; removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="t-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def ipc_address(short_dir: Path) -> str:
    """A free ``ipc://`` address."""
    return f"ipc://{short_dir}/{secrets.token_hex(4)}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here is left at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of an engine are in this process: they come to their proofs together."""
    monkeypatch.setattr("coordinator.client.lives.QUIET_HOLD_S", 0.1)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Start programs with this; none outlives the test."""
    started = Programs(tmp_path)
    yield started
    started.end()
