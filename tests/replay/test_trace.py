"""A trace is read as it was written, and what is no trace is refused by its line."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.replay.errors import ReplayError
from coordinator.replay.trace import BLOCK_TOKENS, Prompt, read

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[list[dict[str, Any]]], Path]

SMALL = Path(__file__).parents[2] / "configs" / "replay" / "small.jsonl"


def line(timestamp: float = 0, **other: object) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | other


def test_times_count_from_the_first_request(write: Write) -> None:
    path = write([line(2000, unknown=1), line(2500, input_length=1, hash_ids=[7])])
    assert read(path) == [Prompt(0.0, 600, 5, (0, 1)), Prompt(0.5, 1, 5, (7,))]


def test_the_first_seconds_are_those_before_the_bound(write: Write) -> None:
    path = write([line(0), line(999), line(1000)])
    assert [prompt.at_s for prompt in read(path, 1.0)] == [0.0, 0.999]


def test_a_packed_trace_is_unpacked(write: Write, tmp_path: Path) -> None:
    plain = write([line(0), line(10)])
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed) == read(plain)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([line(0), line(0, input_length=0)], "trace.jsonl:2: Expected `int` >= 1"),
        ([line(5), line(4)], "trace.jsonl:2: its timestamp is before that of the line before"),
        ([], "there is no request in it"),
    ],
)
def test_what_is_no_trace_is_refused(write: Write, lines: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(sentence)):
        read(write(lines))


def test_a_file_that_is_cut_or_not_there_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="No such file"):
        read(tmp_path / "none.jsonl")
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(write([line(0)] * 50).read_bytes())[:-20])
    with pytest.raises(ReplayError, match="cannot be read"):
        read(packed)


def test_the_trace_of_the_project_is_one_and_has_prefixes_that_recur() -> None:
    prompts = read(SMALL)
    assert len(prompts) == 80
    assert all(len(prompt.blocks) == -(-prompt.input_tokens // BLOCK_TOKENS) for prompt in prompts)
    longer = [
        later
        for n, later in enumerate(prompts)
        for earlier in prompts[:n]
        if earlier.blocks[:3] == later.blocks[:3]
    ]
    assert len(longer) > 10
