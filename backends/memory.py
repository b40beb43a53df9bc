"""What backends must know about memory before they trust an address or a path."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.base import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Region

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - the one directory from which pools may come


class Mapping(NamedTuple):
    """One line of the kernel's list of our mappings: ``[start, end)``, writable?, file inode."""

    start: int
    end: int
    usable: bool
    inode: int


def check_region(region: Region, registered: Sequence[Region], kinds: Sequence[str] = ("host",)) -> None:
    """Refuse memory that is empty, of a kind not in ``kinds``, not mapped, or registered already.

    Native engines accept any address and crash when they use it; so nothing may reach them
    unchecked. Of device memory only the overlap can be checked here.

    Raises:
        InvalidTransferError: saying which.

    """
    end = region.address + region.size_bytes
    if region.memory not in kinds:
        message = f"memory {region.memory!r} is not supported here, only {', '.join(kinds)}"
        raise InvalidTransferError(message)
    if region.size_bytes <= 0 or region.address <= 0:
        message = f"region of {region.size_bytes} bytes at {region.address:#x}: both must be positive"
        raise InvalidTransferError(message)
    for number, other in enumerate(registered):
        same_memory = (other.memory, other.device) == (region.memory, region.device)
        if same_memory and region.address < other.address + other.size_bytes and other.address < end:
            message = f"region at {region.address:#x} overlaps region {number} at {other.address:#x}"
            raise InvalidTransferError(message)
    if region.memory == "host":
        _check_mapped(region)


def _check_mapped(region: Region) -> None:
    """Refuse host memory that is not wholly mapped for reading and writing."""
    reached, end = region.address, region.address + region.size_bytes
    for mapping in _mappings():
        if mapping.start <= reached < mapping.end and mapping.usable:
            reached = mapping.end
    if reached < end:
        message = (
            f"region of {region.size_bytes} bytes at {region.address:#x} "
            f"is not mapped for reading and writing from {reached:#x} on"
        )
        raise InvalidTransferError(message)


def maps_file(region: Region, inode: int) -> bool:
    """Whether the region starts inside a mapping of the file with this inode."""
    return any(
        mapping.start <= region.address < mapping.end and mapping.inode == inode for mapping in _mappings()
    )


def open_shared(path: str, size_bytes: int) -> int:
    """Open a memory file for reading and writing, if it is exactly what it should be.

    Accepted is a regular file directly in ``/dev/shm``, no link, of our own user, of exactly
    ``size_bytes``. Returns a descriptor that the caller closes.

    Raises:
        InvalidTransferError: the path is anything else.

    """
    directory, _, name = path.rpartition("/")
    if directory != SHM_DIRECTORY or name in ("", ".", "..") or "\0" in name:
        message = f"{path!r} is not a file directly in {SHM_DIRECTORY}"
        raise InvalidTransferError(message)
    try:
        # O_NONBLOCK: a device put in its place, or a lease on it, must not hold us up.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        cure = f"both processes must share one {SHM_DIRECTORY} and one user"
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            cure = "raise the limit of open files, of this process or of its host"
        message = f"{path!r} cannot be opened: {error.strerror}; {cure}"
        raise InvalidTransferError(message) from error
    found = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is not a regular file"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not to ours ({os.geteuid()})"
    elif found.st_size != size_bytes:
        problem = f"has {found.st_size} bytes, should have {size_bytes}"
    if problem:
        os.close(descriptor)
        message = f"{path!r} {problem}"
        raise InvalidTransferError(message)
    return descriptor


def this_host() -> str:
    """Name this host and our PID namespace; processes with the same name may copy into each other.

    Where the kernel does not tell, it is a name that every such host has.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _mappings() -> list[Mapping]:
    """All mappings of this process, by rising address."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        bounds, permissions, _offset, _device, inode, *_name = line.split(maxsplit=5)
        start, _, end = bounds.partition("-")
        found.append(Mapping(int(start, 16), int(end, 16), permissions.startswith("rw"), int(inode)))
    return found
