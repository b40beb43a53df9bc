"""How a coordinator starts, what keeps it from it, and what it leaves behind."""

from __future__ import annotations

import socket
import tempfile
from typing import TYPE_CHECKING

import pytest
import zmq

from coordinator.config import Config, Listen
from coordinator.errors import ConfigError
from coordinator.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def listen(short_dir: Path) -> Listen:
    return Listen(control=(f"ipc://{short_dir}/control",), outcomes=(f"ipc://{short_dir}/outcomes",))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield own
    own.destroy(linger=0)


async def started(service: Service) -> AsyncIterator[Service]:
    """Start a service, and stop it at the end, as ``coordinator.service.serve`` does."""
    try:
        await service.start()
        yield service
    finally:
        await service.stop()


async def start_and_stop(service: Service) -> None:
    async for _ in started(service):
        pass


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
