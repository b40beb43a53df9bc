"""The gate on a file: who is inside, who may go in, and what the kernel does when somebody dies."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends.file_locks import Range, holder, try_lock, unlock
from backends.gate import GATES_FROM, Gate, Passage
from backends.memory import open_shared
from tests.backends.memory import SharedMemory
from tests.backends.rigs import ROOT
from tests.support.descriptors import open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096


@pytest.fixture
def path() -> Iterator[str]:
    memory = SharedMemory(SIZE)
    yield memory.path
    memory.remove()


def gate_on(path: str) -> Gate:
    return Gate(open_shared(path, SIZE))


def passage(gate: Gate, path: str) -> Passage:
    return Passage.at(path, SIZE, gate.number)


def test_writers_go_in_while_the_gate_is_open(path: str) -> None:
    gate = gate_on(path)
    one, other = passage(gate, path), passage(gate, path)
    assert one.is_open()
    assert one.enter()
    assert other.enter()
    gate.shut()
    assert not one.is_open()
    assert not one.enter(), "inside, and nothing new may be begun"
    assert not passage(gate, path).enter()
    assert not gate.is_empty()
    one.leave()
    assert not gate.is_empty(), "the other one is inside"
    other.close()
    assert gate.is_empty()
    assert gate.is_empty()
    assert not one.enter()
    one.close()


def test_what_is_closed_lets_nobody_in_and_keeps_no_file_open(path: str) -> None:
    before = open_files()
    gate = gate_on(path)
    insider, late = passage(gate, path), passage(gate, path)
    assert insider.enter()
    for _ in range(2):
        insider.close()
        assert not insider.is_open()
        assert not insider.enter()
    gate.close()
    gate.close()
    assert not late.is_open(), "its owner has gone"
    assert not late.enter()
    late.close()
    assert open_files() == before


def test_a_gate_that_is_found_empty_keeps_no_file_open(path: str) -> None:
    before = open_files()
    gate = gate_on(path)
    gate.shut()
    assert gate.is_empty()
    assert open_files() == before


def test_a_forked_child_neither_leaves_for_its_parent_nor_stays_inside(path: str) -> None:
    """They share the lock: only who entered may give it back, and must do so by itself."""
    gate = gate_on(path)
    writer = passage(gate, path)
    assert writer.enter()
    gate.shut()
    goes_on, stop = os.pipe()
    child = os.fork()
    if not child:
        os.close(stop)
        os.read(goes_on, 1)
        os._exit(0)
    try:
        assert not gate.is_empty(), "the parent is inside"
        leaver = os.fork()
        if not leaver:
            writer.close()
            os._exit(0)
        os.waitpid(leaver, 0)
        assert not gate.is_empty(), "the parent is inside, whatever its child did"

        writer.close()

        assert gate.is_empty(), "though a child lives that has the descriptor"
    finally:
        os.close(stop)
        os.waitpid(child, 0)
        os.close(goes_on)


def test_gates_of_one_file_do_not_know_each_other(path: str) -> None:
    first, second = gate_on(path), gate_on(path)
    assert first.number != second.number
    writer = passage(first, path)
    assert writer.enter()
    second.shut()
    assert second.is_empty()
    assert writer.is_open()
    first.shut()
    assert not first.is_empty()
    writer.close()
    assert first.is_empty()


def test_a_gate_does_not_meet_a_lock_on_what_lies_before_it(path: str) -> None:
    descriptor = open_shared(path, SIZE)
    assert try_lock(descriptor, Range(0, GATES_FROM))
    gate = gate_on(path)
    writer = passage(gate, path)
    assert writer.enter()
    writer.close()
    os.close(descriptor)


def test_the_dead_have_left_and_a_dead_owner_has_shut_its_gate(path: str) -> None:
    program = (
        "import sys; from backends.gate import Gate, Passage; from backends.memory import open_shared\n"
        "path, number = sys.argv[1], int(sys.argv[2])\n"
        f"if number: writer = Passage.at(path, {SIZE}, number); assert writer.enter()\n"
        f"else: gate = Gate(open_shared(path, {SIZE})); number = gate.number\n"
        "print(number, flush=True); sys.stdin.read()"
    )

    def start(number: int) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, path, str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    gate = gate_on(path)
    process, _ = start(gate.number)
    gate.shut()
    assert not gate.is_empty()
    process.kill()
    process.communicate()
    assert gate.is_empty()

    process, number = start(0)
    writer = Passage.at(path, SIZE, number)
    assert writer.enter()
    process.kill()
    process.communicate()
    assert not writer.is_open()
    writer.close()


def test_a_lock_names_its_range_to_whoever_meets_it(path: str) -> None:
    one, other = open_shared(path, SIZE), open_shared(path, SIZE)
    assert try_lock(one, Range(0, 1000))
    assert holder(other, Range(0, 10)) == Range(0, 1000)
    assert holder(one, Range(0, 10)) is None, "its own"
    assert not try_lock(other, Range(999, 5), shared=True)
    unlock(one, Range(0, 1000))
    assert try_lock(other, Range(999, 5), shared=True)
    assert not try_lock(one, Range(999, 1))
    os.close(other)
    assert try_lock(one, Range(999, 1))
    os.close(one)
