"""No path leads to memory that is not meant, and no address to memory that is not there."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.base import InvalidTransferError, Region
from backends.memory import SHM_DIRECTORY, check_region, maps_file, open_shared
from tests.backends.memory import PREFIX
from tests.support.descriptors import open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.backends.memory import SharedMemory

PAGE = mmap.PAGESIZE


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in shared memory that is free now, and removed afterwards."""
    path = Path(PREFIX + secrets.token_hex(16))
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def test_a_good_file_is_opened(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    descriptor = open_shared(str(path), 100)
    try:
        assert os.pread(descriptor, 200, 0) == b"x" * 100
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size_bytes", [99, 101, 0, -1, 2**62])
def test_another_size_is_refused(path: Path, size_bytes: int) -> None:
    path.write_bytes(b"x" * 100)
    with pytest.raises(InvalidTransferError, match="100 bytes"):
        open_shared(str(path), size_bytes)


OTHER_PLACES = [
    "",
    "/",
    SHM_DIRECTORY,
    *(
        f"{SHM_DIRECTORY}/{name}"
        for name in ("", ".", "..", "../null", "/x", "a/b", "../../etc/passwd", "a\0b")
    ),
    "/dev/null",
    "/proc/self/mem",
    "relative",
    "dev/shm/x",
]


@pytest.mark.parametrize("elsewhere", OTHER_PLACES)
def test_other_places_are_refused(elsewhere: str) -> None:
    with pytest.raises(InvalidTransferError, match="not a file directly in"):
        open_shared(elsewhere, 0)


def test_nothing_there_is_refused(path: Path) -> None:
    with pytest.raises(InvalidTransferError, match="No such file"):
        open_shared(str(path), 1)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(b"x")
    path.symlink_to(target)
    with pytest.raises(InvalidTransferError, match="cannot be opened"):
        open_shared(str(path), 1)


def test_a_directory_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(InvalidTransferError):
        open_shared(str(path), path.stat().st_size)


def test_a_fifo_is_refused_and_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(InvalidTransferError, match="not a regular file"):
        open_shared(str(path), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_of_another_user_is_refused(path: Path) -> None:
    path.write_bytes(b"x")
    os.chown(path, 65534, 65534)
    with pytest.raises(InvalidTransferError, match="belongs to user 65534"):
        open_shared(str(path), 1)


def test_refused_files_are_closed_again(path: Path) -> None:
    path.write_bytes(b"x")
    before = open_files()
    for _ in range(10):
        with pytest.raises(InvalidTransferError):
            open_shared(str(path), 2)
    assert open_files() == before


def test_mappings_side_by_side_are_one_region(make_memory: Callable[..., SharedMemory]) -> None:
    """A region may span several mappings, as long as there is no hole and all are writable."""
    memory = make_memory(8 * PAGE)
    start = memory.region.address
    check_region(Region(start, 8 * PAGE), [])
    with pytest.raises(InvalidTransferError, match="not mapped"):
        check_region(Region(start, 2**40), [])


def test_memory_that_cannot_be_written_is_refused() -> None:
    with Path("/dev/zero").open("rb") as file, mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        region = Region(array.ctypes.data, PAGE)
        del array
        with pytest.raises(InvalidTransferError, match="not mapped for reading and writing"):
            check_region(region, [])


@pytest.mark.parametrize(("address", "size_bytes"), [(0, 4096), (-4096, 4096), (4096, 0), (4096, -1), (0, 0)])
@pytest.mark.parametrize("memory", ["host", "cuda"])
def test_memory_of_no_bytes_or_nowhere_is_refused(address: int, size_bytes: int, memory: str) -> None:
    with pytest.raises(InvalidTransferError, match="both must be positive"):
        check_region(Region(address, size_bytes, memory=memory), [], ("host", "cuda"))


def test_other_devices_do_not_overlap() -> None:
    first = Region(4096, 4096, memory="cuda", device=0)
    check_region(Region(4096, 4096, memory="cuda", device=1), [first], ("host", "cuda"))
    with pytest.raises(InvalidTransferError, match="overlaps region 0"):
        check_region(Region(4096, 4096, memory="cuda", device=0), [first], ("host", "cuda"))


def test_the_file_behind_a_region_is_known(make_memory: Callable[..., SharedMemory]) -> None:
    one, other = make_memory(PAGE), make_memory(PAGE)
    assert maps_file(one.region, Path(one.path).stat().st_ino)
    assert not maps_file(one.region, Path(other.path).stat().st_ino)
