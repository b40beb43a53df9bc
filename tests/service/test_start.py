"""How a coordinator starts, what keeps it from it, and what it leaves behind."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq
import zmq.auth

from coordinator.config import Config, Limits, Listen, Security
from coordinator.errors import ConfigError
from coordinator.service import Service
from coordinator.socket_files import SocketFile
from coordinator.sockets import bind, router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def listen(short_dir: Path) -> Listen:
    return Listen(control=(f"ipc://{short_dir}/control",), outcomes=(f"ipc://{short_dir}/outcomes",))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield own
    own.destroy(linger=0)


@asynccontextmanager
async def started(service: Service) -> AsyncIterator[Service]:
    """Start a service, and stop it at the end, as ``coordinator.service.serve`` does."""
    try:
        await service.start()
        yield service
    finally:
        await service.stop()


async def start_and_stop(service: Service) -> None:
    async with started(service):
        pass


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_no_room_for_temporary_files_is_a_sentence_and_nothing_is_removed(
    listen: Listen,
    context: zmq.Context[zmq.Socket[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "precious").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR: cannot make a directory for the workers' socket"):
        await start_and_stop(Service(Config(listen=listen), context))
    assert (tmp_path / "precious").exists()


async def test_a_directory_that_cannot_be_locked_is_a_sentence(
    listen: Listen,
    context: zmq.Context[zmq.Socket[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next coordinator would take it for one that a dead one has left behind, and remove it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"TMPDIR: .*kv-coordinator-.* cannot be locked"):
        await start_and_stop(Service(Config(listen=listen), context))
    assert not files_in(tmp_path)


async def test_an_address_that_is_listened_on_is_not_taken_away(
    listen: Listen, context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    async with started(Service(Config(listen=listen), context)) as first:
        with pytest.raises(
            ConfigError, match=r"listen\.control: another process listens on .*control already"
        ):
            await start_and_stop(Service(Config(listen=listen), context))
        assert (short_dir / "control").is_socket()
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(f"{short_dir}/control")
        assert first.addresses == list(listen.control)
    assert not files_in(short_dir)


def test_of_two_that_start_in_one_instant_one_has_the_address(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_looked, both_decided = threading.Barrier(2), threading.Barrier(2)
    looked = socket.socket.connect_ex

    def look_together(line: socket.socket, address: str) -> int:
        problem = looked(line, address)
        if address.endswith("control"):
            with suppress(threading.BrokenBarrierError):
                both_looked.wait(0.5)
        return problem

    async def start(context: zmq.Context[zmq.Socket[bytes]]) -> str:
        service = Service(Config(listen=listen), context)
        try:
            await service.start()
        except ConfigError as error:
            return str(error)
        else:
            return "started"
        finally:
            both_decided.wait(10)
            await service.stop()

    def run() -> str:
        with zmq.Context() as context:
            return asyncio.run(start(context))

    monkeypatch.setattr(socket.socket, "connect_ex", look_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = sorted(future.result(20) for future in [threads.submit(run) for _ in range(2)])
    assert "control: another process listens on" in first
    assert second == "started"


def test_what_takes_the_place_of_a_socket_that_was_removed_stays(short_dir: Path) -> None:
    """By its own rules libzmq would remove it, in a thread of its own, whenever it comes to it."""
    path = short_dir / "control"
    files: list[SocketFile] = []
    with zmq.Context() as context, router(context, Limits()) as line:
        assert bind(line, f"ipc://{path}", "control", files) == f"ipc://{path}"
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        files[0].remove()
        following = SocketFile(path, "control")
    assert path.is_socket()
    following.listener.close()
    following.remove()
    assert not files_in(short_dir)


async def test_a_socket_file_that_nobody_listens_on_is_no_obstacle(
    listen: Listen, context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(f"{short_dir}/control")
    assert (short_dir / "control").is_socket()
    await start_and_stop(Service(Config(listen=listen), context))


async def test_a_file_that_is_no_socket_is_not_replaced_by_one(
    listen: Listen, context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    (short_dir / "outcomes").write_text("precious")
    with pytest.raises(ConfigError, match=r"listen\.outcomes: .*outcomes is there and is no socket"):
        await start_and_stop(Service(Config(listen=listen), context))
    assert (short_dir / "outcomes").read_text() == "precious"


async def test_a_directory_that_cannot_be_made_is_a_sentence(
    context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    (short_dir / "file").touch()
    listen = Listen(control=(f"ipc://{short_dir}/file/control",), outcomes=(f"ipc://{short_dir}/outcomes",))
    with pytest.raises(ConfigError, match=r"listen\.control: cannot make the directory .*file"):
        await start_and_stop(Service(Config(listen=listen), context))


async def test_a_port_that_is_taken_is_a_sentence(
    context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        listen = Listen(
            control=(f"tcp://127.0.0.1:{port}",),
            outcomes=(f"ipc://{short_dir}/outcomes", "tcp://127.0.0.1:0"),
        )
        with pytest.raises(ConfigError, match=f"listen.control: cannot listen on tcp://127.0.0.1:{port}"):
            await start_and_stop(Service(Config(listen=listen), context))


async def test_a_path_that_is_too_long_for_a_socket_is_a_sentence(
    context: zmq.Context[zmq.Socket[bytes]], short_dir: Path
) -> None:
    listen = Listen(control=(f"ipc://{short_dir}/{'x' * 120}",), outcomes=(f"ipc://{short_dir}/outcomes",))
    with pytest.raises(ConfigError, match=r"listen\.control: .*xxx cannot be used: .*too long"):
        await start_and_stop(Service(Config(listen=listen), context))


async def test_a_directory_that_may_not_be_entered_is_a_sentence(
    context: zmq.Context[zmq.Socket[bytes]], listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", _refuse)
    with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
        await start_and_stop(Service(Config(listen=listen), context))


async def test_the_socket_of_another_user_is_told_as_what_it_is(
    context: zmq.Context[zmq.Socket[bytes]], listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EACCES)
    with pytest.raises(ConfigError, match="belongs to another user"):
        await start_and_stop(Service(Config(listen=listen), context))


async def test_a_directory_of_another_user_is_no_obstacle(
    context: zmq.Context[zmq.Socket[bytes]],
    listen: Listen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody can make one of such a name where temporary files are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / "kv-coordinator-theirs"
    theirs.mkdir()
    # Python 3.11 asks the system so, and a directory of mode 0700 refuses all but root.
    known = Path.is_socket
    monkeypatch.setattr(
        Path, "is_socket", lambda path: _refuse(path) if path.parent == theirs else known(path)
    )
    await start_and_stop(Service(Config(listen=listen), context))
    assert theirs.is_dir()


def _refuse(path: Path) -> bool:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


async def test_a_service_whose_authenticator_has_died_still_stops(
    context: zmq.Context[zmq.Socket[bytes]], listen: Listen, tmp_path: Path
) -> None:
    async with started(Service(Config(listen=listen, security=_keys(tmp_path)), context)) as service:
        authenticator = service._authenticator
        assert authenticator is not None
        assert authenticator.is_alive()
        authenticator.pipe.send(b"TERMINATE")
        authenticator.thread.join(10)
        assert not authenticator.is_alive()
    assert authenticator.pipe is None


def _keys(directory: Path) -> Security:
    server, client = (zmq.auth.create_certificates(directory, name) for name in ("server", "client"))
    Path(server[1]).chmod(0o600)
    (directory / "clients").mkdir()
    Path(client[0]).rename(directory / "clients" / "client.key")
    return Security(server_key=Path(server[1]), client_keys=directory / "clients")
