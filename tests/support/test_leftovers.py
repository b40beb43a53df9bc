"""What is left behind is found; a test run would otherwise be green over rubbish."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import leftovers
from tests.support.waiting import eventually, eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Programs


@pytest.fixture
def pool() -> Iterator[Path]:
    path = Path(f"/dev/shm/kv-coordinator-test-{secrets.token_hex(8)}")  # noqa: S108 - where pools are
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink(missing_ok=True)


def test_an_orphan_is_found_by_the_mark_in_its_environment() -> None:
    mark = secrets.token_hex(8)
    # The shell ends at once; what it started has no parent of ours any more.
    out = subprocess.run(
        ["/bin/sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"],
        env={**os.environ, leftovers.MARK: mark},
        capture_output=True,
        check=True,
    )
    orphan = int(out.stdout)
    found = leftovers.processes(mark)
    for process in found:
        if process.pid == orphan:
            process.kill()
    assert orphan in {process.pid for process in found}


def test_a_pool_that_nobody_has_mapped_is_found(pool: Path) -> None:
    assert pool in leftovers.pools()
    assert leftovers.unused({pool}) == {pool}


def test_a_pool_that_another_process_has_mapped_is_not_rubbish(pool: Path, programs: Programs) -> None:
    program = programs.python(
        "-c",
        "import mmap, sys, time\n"
        "with open(sys.argv[1], 'r+b') as file: memory = mmap.mmap(file.fileno(), 0)\n"
        "print('mapped', flush=True)\n"
        "time.sleep(60)\n",
        str(pool),
    )
    program.says("mapped")
    assert leftovers.unused({pool}) == set()
    program.end()
    assert leftovers.unused({pool}) == {pool}


def test_a_socket_file_is_found(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "control"))
        (short_dir / "plain").touch()
        assert leftovers.sockets(short_dir) == [short_dir / "control"]


def test_a_program_ends_with_its_test(programs: Programs) -> None:
    program = programs.start("/bin/sleep", "60")
    assert program.process.poll() is None
    programs.end()
    assert program.process.poll() is not None


def test_a_program_that_ends_early_is_told_with_its_output(programs: Programs) -> None:
    program = programs.python("-c", "raise SystemExit('no luck')")
    with pytest.raises(AssertionError, match="never said 'ready'") as failure:
        program.says("ready")
    assert "no luck" in str(failure.value)


def test_eventually_returns_the_value_and_names_what_stays_false() -> None:
    values = iter([0, 0, 7])
    assert eventually(lambda: next(values)) == 7
    with pytest.raises(AssertionError, match="the moon is full"):
        eventually(lambda: False, timeout_s=0.02, what="the moon is full")


@pytest.mark.looptime
async def test_eventually_async_uses_the_clock_of_the_loop() -> None:
    with pytest.raises(AssertionError, match="within 3600 s"):
        await eventually_async(lambda: False, timeout_s=3600)


def test_this_python_is_the_one_of_the_programs(programs: Programs) -> None:
    program = programs.python("-c", "import sys; print(sys.prefix)")
    assert program.wait() == 0
    assert program.output().strip() == sys.prefix
