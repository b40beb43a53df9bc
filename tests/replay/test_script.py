"""Scripts of faults: what they may say, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.replay.errors import ReplayError
from coordinator.replay.script import Abort, Restart, Stop, read

WORLDS = {"prefill-0": 2, "decode-0": 2, "decode-1": 2}
RESTARTS = Path(__file__).parents[2] / "configs" / "replay" / "restarts.toml"


def test_faults_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(
        '[[restart]]\nat_s = 9\ngroup = "decode-0"\n'
        '[[stop]]\nat_s = 3.5\ngroup = "decode-1"\nrank = 1\nfor_s = 2\n'
        '[[abort]]\nat_s = 4\nby = "prefill"\nrequests = 2\n'
    )
    assert read(file, WORLDS) == [
        Stop(3.5, "decode-1", 1, 2.0),
        Abort(4.0, "prefill", 2),
        Restart(9.0, "decode-0"),
    ]


def test_the_script_of_the_project_restarts_decode_three_times() -> None:
    faults = read(RESTARTS, WORLDS)
    assert [fault.at_s for fault in faults if isinstance(fault, Restart)] == [120, 300, 480]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[restart]]\nat_s = 1\ngroup = "decode-7"', "there is no engine 'decode-7'; there are prefill-0,"),
        (
            '[[stop]]\nat_s = 1\ngroup = "decode-0"\nrank = 2\nfor_s = 1',
            "decode-0 has no rank 2, but 2 ranks",
        ),
        ('[[restart]]\nat_s = 1\ngroup = "decode-0"\nfor_s = 1', "unknown field `for_s`"),
        ("[[reboot]]\nat_s = 1", "unknown field `reboot`"),
        ('[[restart]]\nat_s = inf\ngroup = "decode-0"', "Expected `float` <= "),
        ("a = " + "[" * 5000, "maximum recursion depth exceeded"),
        ("a = " + "1" * 5000, "Exceeds the limit"),
        ("[[restart]", "Expected ']]'"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(text)
    with pytest.raises(ReplayError, match=re.escape(sentence)):
        read(file, WORLDS)
    with pytest.raises(ReplayError, match="cannot be read"):
        read(tmp_path / "none.toml", WORLDS)
