"""Pools: shared memory that is gone when its owner is, however that ended."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
import torch

from coordinator.client import KVPool, Layout
from coordinator.client import segment as segments
from coordinator.client.introduction import introduction
from coordinator.client.segment import Segment
from coordinator.errors import LayoutError, PoolError
from coordinator.layout import Extra
from coordinator.messages import Role
from coordinator.worker.memory import MappedPool
from coordinator.worker.settings import is_pool_path, new_pool_path
from tests.client.peer import LAYOUT
from tests.support.descriptors import open_files
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.processes import Program, Programs

OWNER = """
import os, sys, time
from coordinator.client.segment import Segment
segment = Segment(1 << 20)
print("path", segment.path, "janitor", segment._janitor.pid, flush=True)
"""


def owner(programs: Programs, then: str) -> tuple[Program, Path, int]:
    """Start a process that owns a segment and goes on with ``then``; its path and its janitor."""
    program = programs.python("-c", OWNER + then)
    program.says("janitor")
    _, path, _, janitor = program.output().split()[:4]
    return program, Path(path), int(janitor)


def test_a_pool_is_one_zeroed_buffer_layer_first() -> None:
    with KVPool.allocate(LAYOUT, 8, world_size=2) as pool:
        # 2 layers, K and V apart; a page: 4 tokens x 2 of 4 heads x 8 values x 2 bytes.
        assert pool.tensor.shape == (4, 8, 128)
        assert pool.tensor.dtype is torch.uint8
        assert pool.tensor.is_contiguous()
        assert int(pool.tensor.count_nonzero()) == 0
        assert pool.size_bytes == 4 * 8 * 128 == LAYOUT.pool_bytes(8, 2)
        assert pool.regions[0].address == pool.tensor.data_ptr()
        assert (pool.layout, pool.pages, pool.world_size) == (LAYOUT, 8, 2)


def test_it_is_an_array_for_those_without_torch() -> None:
    script = """
import sys
from coordinator.client import KVPool
from tests.client.peer import LAYOUT
with KVPool.allocate(LAYOUT, 8, world_size=2) as pool:
    (array,) = pool.arrays
    array[3, 5, 7] = 42
    assert "torch" not in sys.modules
    assert (array.shape, array.ctypes.data) == ((4, 8, 128), pool.regions[0].address)
    assert pool.tensor[3, 5, 7] == 42
print("well")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr


def test_an_engine_s_own_tensors_are_seen_as_arrays_where_they_lie_on_the_host() -> None:
    planes = [torch.zeros(8, 256, dtype=torch.uint8) for _ in range(4)]
    pool = KVPool.wrap(planes, LAYOUT)
    pool.arrays[2][0, 5, 7] = 42
    assert planes[2][5, 7] == 42
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        _ = pool.arrays


def test_its_file_is_named_as_workers_want_it_and_private() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool:
        assert is_pool_path(pool.path)
        assert stat.S_IMODE(Path(pool.path).stat().st_mode) == 0o600
        assert Path(pool.path).stat().st_size == pool.size_bytes


def test_a_worker_sees_the_same_bytes() -> None:
    with KVPool.allocate(LAYOUT, 8) as pool:
        mapped = MappedPool(pool.path, pool.size_bytes)
        pool.tensor[3, 5, 7] = 42
        plane_bytes, page_bytes = pool.tensor.stride(0), pool.tensor.stride(1)
        data = Path(pool.path).read_bytes()
        assert data[3 * plane_bytes + 5 * page_bytes + 7] == 42
        assert mapped.region.size_bytes == pool.size_bytes
        mapped.close()


def test_closing_removes_the_file_and_leaves_tensors_valid() -> None:
    pool = KVPool.allocate(LAYOUT, 8)
    tensor, path = pool.tensor, Path(pool.path)
    janitor = psutil.Process(_janitor(pool).pid)
    pool.close()
    assert not path.exists()
    eventually(lambda: _has_ended(janitor.pid), 10, "the janitor ends")
    tensor.fill_(1)
    with pytest.raises(PoolError, match="closed"):
        _ = pool.tensor
    pool.close()


def test_a_pool_that_nobody_refers_to_is_removed() -> None:
    pool = KVPool.allocate(LAYOUT, 8)
    path = Path(pool.path)
    del pool
    assert not path.exists()


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every path that is drawn for a pool."""
    drawn: list[Path] = []

    def draw() -> str:
        drawn.append(Path(new_pool_path()))
        return str(drawn[-1])

    monkeypatch.setattr(segments, "new_pool_path", draw)
    return drawn


def test_the_memory_is_there_before_it_is_written(paths: list[Path]) -> None:
    """No SIGBUS in mid-write: what does not fit is refused at once."""
    with pytest.raises(PoolError, match=r"does not fit into /dev/shm, where \d+ bytes are free"):
        KVPool.allocate(LAYOUT, 2**28)
    assert not paths[0].exists()
    with KVPool.allocate(LAYOUT, 4096) as pool:
        assert Path(pool.path).stat().st_blocks * 512 >= pool.size_bytes


def test_what_the_check_misses_is_refused_too(monkeypatch: pytest.MonkeyPatch, paths: list[Path]) -> None:
    """Another process may take the space between the check and the allocation."""
    monkeypatch.setattr(segments, "_check_space", lambda *_: None)
    with pytest.raises(PoolError, match="cannot be created"):
        Segment(1 << 50)
    assert not paths[0].exists()


@pytest.mark.parametrize("pages", [0, -1, 2**31])
def test_an_impossible_number_of_pages(pages: int) -> None:
    with pytest.raises(PoolError, match="pages x planes must be from 1 to"):
        KVPool.allocate(LAYOUT, pages)


def test_an_impossible_layout() -> None:
    with pytest.raises(LayoutError, match="dtype"):
        KVPool.allocate(Layout(1, 1, 1, 1, "complex"), 1)
    with pytest.raises(LayoutError, match="must divide by the 3 TP ranks"):
        KVPool.allocate(LAYOUT, 1, world_size=3)


@pytest.mark.parametrize(("count", "planes"), [(1, 4), (2, 2), (4, 1)])
def test_an_engine_s_own_tensors_are_used_as_they_are(count: int, planes: int) -> None:
    """Two layers, K and V apart: one tensor for all, for each layer, or for each plane."""
    tensors = [torch.zeros(planes, 8, 4, 4, 8, dtype=torch.bfloat16) for _ in range(count)]
    with KVPool.wrap(tensors, LAYOUT) as pool:
        assert (pool.pages, pool.path) == (8, "")
        assert pool.size_bytes == LAYOUT.pool_bytes(8, 1)
        assert [region.address for region in pool.regions] == [tensor.data_ptr() for tensor in tensors]
        assert {(region.memory, region.size_bytes, region.path) for region in pool.regions} == {
            ("host", planes * 8 * 256, None)
        }
        assert {tensor.shape for tensor in pool.tensors} == {(planes, 8, 256)}
        pool.tensors[-1][planes - 1, 7] = 1
        assert int(tensors[-1].view(torch.uint8).sum()) == 256
        if count > 1:
            with pytest.raises(PoolError, match=r"wraps . tensors: use KVPool\.tensors"):
                _ = pool.tensor
    with pytest.raises(PoolError, match="closed"):
        _ = pool.tensors


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([], "4 planes cannot be shared out evenly over 0 tensors"),
        ([torch.zeros(256)] * 3, "4 planes cannot be shared out evenly over 3 tensors"),
        ([torch.zeros(256), torch.zeros(512)], "they differ in size"),
        ([torch.zeros(65)] * 4, r"\[260\] bytes are no whole number of pages of 1024 bytes in all"),
        ([torch.zeros(0)], r"\[0\] bytes are no whole number"),
        ([torch.zeros(16, 16).T], "not all are contiguous"),
        ([torch.zeros(256), torch.zeros(256, device="meta")], "they are on cpu, meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: list[torch.Tensor], problem: str) -> None:
    with pytest.raises(PoolError, match=problem):
        KVPool.wrap(tensors, LAYOUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: pinning works")
def test_pinning_without_a_gpu_is_refused() -> None:
    with pytest.raises(PoolError, match="no CUDA device"):
        KVPool.allocate(LAYOUT, 8, pin=True)


def test_a_killed_owner_leaves_nothing(programs: Programs) -> None:
    program, path, janitor = owner(programs, "time.sleep(60)")
    assert path.exists()
    program.process.kill()
    program.wait()
    eventually(lambda: not path.exists(), 10, "the file is removed")
    eventually(lambda: _has_ended(janitor), 10, "the janitor ends")


def test_an_owner_that_is_killed_with_all_its_children_leaves_nothing(programs: Programs) -> None:
    """As engines do it with what does not end in time."""
    program, path, _ = owner(programs, "time.sleep(60)")
    process = psutil.Process(program.process.pid)
    for member in (*process.children(recursive=True), process):
        member.kill()
    program.wait()
    eventually(lambda: not path.exists(), 10, "the file is removed")


def test_a_killed_group_of_processes_leaves_nothing(programs: Programs) -> None:
    """Ctrl-C, a terminal that closes, a supervisor that signals everything it started."""
    program, path, janitor = owner(programs, "time.sleep(60)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(janitor, number)
    program.process.kill()
    program.wait()
    eventually(lambda: not path.exists(), 10, "the file is removed")


def test_an_owner_that_ends_leaves_nothing(programs: Programs) -> None:
    program, path, janitor = owner(programs, "")
    assert program.wait() == 0
    assert not path.exists()
    eventually(lambda: _has_ended(janitor), 10, "the janitor ends")
    assert program.output().count("\n") == 1, "it says nothing on the way"


def test_an_owner_that_fails_leaves_nothing(programs: Programs) -> None:
    program, path, _ = owner(programs, "raise SystemExit(3)")
    assert program.wait() == 3
    assert not path.exists()


def test_a_forked_child_neither_removes_nor_keeps_the_file(programs: Programs) -> None:
    then = """
child = os.fork()
if child == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    program, path, _ = owner(programs, then)
    program.says("child")
    child = psutil.Process(int(program.output().split()[-1]))
    assert path.exists()
    program.process.kill()
    program.wait()
    eventually(lambda: not path.exists(), 10, "the file is removed although the child lives")
    assert child.is_running()
    child.kill()


def test_a_forked_child_that_ends_leaves_the_file(programs: Programs) -> None:
    then = """
if os.fork() == 0:
    sys.exit(0)
os.wait()
print("alive", os.path.exists(segment.path), flush=True)
"""
    program, path, _ = owner(programs, then)
    assert program.wait() == 0
    assert "alive True" in program.output()
    assert not path.exists()


def test_the_janitor_holds_nothing_of_its_owner() -> None:
    read, write = os.pipe()
    try:
        os.set_inheritable(write, True)  # noqa: FBT003 - its only signature
        with KVPool.allocate(LAYOUT, 8) as pool:
            janitor = psutil.Process(_janitor(pool).pid)
            eventually(lambda: janitor.status() == psutil.STATUS_SLEEPING, 10, "it waits")
            files = {str(link.readlink()) for link in Path(f"/proc/{janitor.pid}/fd").iterdir()}
            assert "/dev/null" in files
            assert len(files) == 3, "the others are its pipes"
            assert str(Path(f"/proc/self/fd/{write}").readlink()) not in files
            assert janitor.cwd() == "/"
            assert os.getsid(janitor.pid) == janitor.pid
    finally:
        os.close(read)
        os.close(write)


def test_without_a_janitor_there_is_no_pool(monkeypatch: pytest.MonkeyPatch, paths: list[Path]) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PoolError, match=r"watches over .* \(/bin/false\) does not start"):
        Segment(4096)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(PoolError, match="cannot be started"):
        Segment(4096)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(PoolError, match=r"sys\.executable is empty"):
        Segment(4096)
    assert not any(path.exists() for path in paths)


def test_a_janitor_that_never_says_that_it_is_there_is_ended(
    monkeypatch: pytest.MonkeyPatch, paths: list[Path], tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("coordinator.client.segment._JANITOR_START_S", 0.01)
    before = open_files(), psutil.Process().children()
    with pytest.raises(PoolError, match="does not start"):
        Segment(4096)
    assert (open_files(), psutil.Process().children()) == before
    assert not any(path.exists() for path in paths)


def test_a_janitor_that_was_killed_changes_nothing_for_the_owner() -> None:
    pool = KVPool.allocate(LAYOUT, 8)
    _janitor(pool).kill()
    pool.close()
    assert not Path(pool.path).exists()


def _janitor(pool: KVPool) -> psutil.Process:
    assert pool._segment is not None
    return psutil.Process(pool._segment._janitor.pid)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone; whoever inherits it may leave its zombie for a while."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_pool_of_a_stage_has_its_layers_and_extras_lie_behind_k_and_v() -> None:
    layout = msgspec.structs.replace(
        LAYOUT,
        layers=3,
        stages=(1, 2),
        extras=(Extra("k_scale", 1, "float32"), Extra("v_scale", 1, "float32")),
    )
    with KVPool.allocate(layout, 8, world_size=4, rank=3) as pool:
        # 2 of 3 layers, 2 of 4 heads, 4 tokens: 8 values of 2 bytes a head, and a scale of 4 bytes.
        assert pool.tensor.shape == (4, 8, 4 * 2 * 8 * 2)
        assert [extra.shape for extra in pool.extras] == [(2, 8, 4 * 2 * 4)] * 2
        assert pool.size_bytes == layout.pool_bytes(8, 4, 3) == Path(pool.path).stat().st_size
        pool.extras[1][1, 7, 31] = 42
        assert Path(pool.path).read_bytes()[-1] == 42
        with pytest.raises(
            PoolError, match="5120 bytes, but 8 pages of rank 0 need 2560: its pipeline stage"
        ):
            introduction(Role.PREFILL, "ipc:///x", "p", 0, 4, pool)
        assert introduction(Role.PREFILL, "ipc:///x", "p", 2, 4, pool).pool.size_bytes == pool.size_bytes
    with pytest.raises(PoolError, match="closed"):
        _ = pool.extras


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there_has_no_pool(rank: int) -> None:
    with pytest.raises(PoolError, match=f"rank is {rank}, must be from 0 to world_size - 1, which is 3"):
        KVPool.allocate(LAYOUT, 8, world_size=4, rank=rank)
