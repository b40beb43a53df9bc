"""Mapping a pool file: only what is exactly a pool, and the same bytes as its owner sees."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from backends.file_locks import holder
from coordinator.errors import PoolBusyError, PoolError
from coordinator.worker.memory import MappedPool, lock_for
from coordinator.worker.settings import is_pool_path, new_pool_path

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 8192
SHM = "/dev/shm"  # noqa: S108 - where pools live


@pytest.fixture
def pool_path() -> Iterator[str]:
    path = new_pool_path()
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb") as file:
        file.truncate(SIZE)
    yield path
    Path(path).unlink(missing_ok=True)


def test_what_is_written_through_the_region_is_in_the_file(pool_path: str) -> None:
    pool = MappedPool(pool_path, SIZE)
    try:
        assert pool.region.size_bytes == SIZE
        assert pool.region.path == pool_path
        assert pool.region.memory == "host"
        ctypes.memset(pool.region.address + SIZE - 3, 7, 3)
        assert Path(pool_path).read_bytes() == bytes(SIZE - 3) + b"\7\7\7"
    finally:
        pool.close()


def test_a_closed_pool_is_mapped_no_more(pool_path: str) -> None:
    pool = MappedPool(pool_path, SIZE)
    assert pool_path in Path("/proc/self/maps").read_text()

    pool.close()

    assert pool_path not in Path("/proc/self/maps").read_text()


def test_new_paths_are_pool_paths_and_differ() -> None:
    first, second = new_pool_path(), new_pool_path()
    assert first != second
    assert is_pool_path(first)
    assert is_pool_path(second)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "SHM/kv-coordinator-",
        "SHM/kv-coordinator-0123456789abcdeg",
        "SHM/kv-coordinator-0123456789abcdef\n",
        "SHM/kv-coordinator-0123456789abcdef/../x",
        "SHM/../shm/kv-coordinator-0123456789abcdef",
        "SHM/sub/kv-coordinator-0123456789abcdef",
        "kv-coordinator-0123456789abcdef",
        "SHM/other-0123456789abcdef0123456789abcdef",
        "SHM/kv-coordinator-0123456789abcdef\0",
        "SHM/kv-coordinator-" + "٣" * 32,
    ],
)
def test_other_names_are_refused_without_a_look_at_the_file(path: str) -> None:
    with pytest.raises(PoolError, match="is not a pool"):
        MappedPool(path.replace("SHM", SHM), SIZE)


def test_a_pool_that_is_not_there_is_refused_with_what_to_check() -> None:
    with pytest.raises(PoolError, match="must share one /dev/shm"):
        MappedPool(new_pool_path(), SIZE)


@pytest.mark.parametrize("size_bytes", [SIZE - 1, SIZE + 1, 0])
def test_another_size_than_was_said_is_refused(pool_path: str, size_bytes: int) -> None:
    with pytest.raises(PoolError, match=f"{SIZE} bytes, should have {size_bytes}"):
        MappedPool(pool_path, size_bytes)


def test_an_empty_pool_is_refused(pool_path: str) -> None:
    os.truncate(pool_path, 0)
    with pytest.raises(PoolError, match="cannot be mapped"):
        MappedPool(pool_path, 0)


def test_a_link_to_a_real_pool_is_refused(pool_path: str) -> None:
    link = Path(new_pool_path())
    link.symlink_to(pool_path)
    try:
        with pytest.raises(PoolError, match=re.escape(str(link))):
            MappedPool(str(link), SIZE)
    finally:
        link.unlink()


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str) -> None:
    path = Path(new_pool_path())
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    try:
        with pytest.raises(PoolError, match=re.escape(str(path))):
            MappedPool(str(path), SIZE)
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(pool_path: str) -> None:
    os.chown(pool_path, 12345, -1)
    with pytest.raises(PoolError, match="belongs to user 12345"):
        MappedPool(pool_path, SIZE)


def test_a_second_worker_waits_until_the_first_is_dead(
    pool_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.worker.memory.LOCK_S", 0.1)
    first = MappedPool(pool_path, SIZE, 2**63 - 1)
    with pytest.raises(PoolBusyError, match="another worker has had it"):
        MappedPool(pool_path, SIZE, 1)
    descriptor = os.open(pool_path, os.O_RDWR)
    assert holder(descriptor, lock_for(1)) == lock_for(2**63 - 1), "whose it is can be seen"
    os.close(descriptor)
    first.close()
    MappedPool(pool_path, SIZE).close()
