"""What operators are shown holds nothing that a terminal would obey."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.commands import caller, operate, shown
from coordinator.printable import printable_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\n[/no][red]markup"
TOLD = r"\x1b]0;owned\x07\x1b[2J\x9b2J\n[/no][red]markup"

FAILURE: dict[str, Any] = {
    "reason": "worker_lost",
    "origin": EVIL,
    "message": EVIL,
    "fault": "ours",
    "retryable": True,
}
HANDOFF: dict[str, Any] = {
    "room": "1",
    "attempt": 1,
    "state": "failed",
    "prefill": EVIL,
    "decode": EVIL,
    "age_s": 1.0,
    "after_prefill_s": None,
    "remaining_s": None,
    "moved_bytes": 0,
    "moving_bytes": 0,
    "missing": EVIL,
    "failure": FAILURE,
    "held": [EVIL],
}
STORY: dict[str, Any] = {
    "handoff": HANDOFF,
    "ended_s": 1.0,
    "story": [{"at_s": 0.5, "state": "failed", "cause": EVIL}],
    "ranks": [{"rank": EVIL, "said": "nothing", "pages": 0, "alive": False, "silent_s": None}],
    "moves": [{"link": EVIL, "link_state": "up", "move": 1, "size_bytes": 1, "ended": False}],
}
STATUS: dict[str, Any] = {
    "name": "kv-coordinator",
    "version": "1",
    "backend": "nixl",
    "uptime_s": 1.0,
    "ready": False,
    "reasons": [EVIL],
    "in_flight": {"open": 1},
    "oldest_s": None,
    "oldest_after_prefill_s": None,
    "succeeded": 0,
    "failed": {},
    "moved_bytes": 0,
    "quarantine": {"handoffs": 0, "held_bytes": 0, "budget_bytes": 0},
    "workers": {},
    "links": {},
    "groups": [
        {
            "name": EVIL,
            "role": "decode",
            "world_size": 1,
            "in_flight": 1,
            "lag": 0,
            "ready": False,
            "missing": [EVIL],
        }
    ],
}


def printed(what: RenderableType, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the commands print of it, in lines that are wide enough."""
    monkeypatch.setenv("COLUMNS", "1000")
    console: Console = operate._console()
    console.file = io.StringIO()
    console.print(what)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("what", "times"),
    [
        (lambda: shown.log_line({"event": EVIL, "why": EVIL, EVIL: 1, "level": EVIL, "timestamp": EVIL}), 5),
        (lambda: shown.handoffs([HANDOFF]), 4),
        (lambda: shown.story(STORY), 9),
        (lambda: shown.story({"room": "1", "attempt": 1, "failure": FAILURE}), 2),
        (lambda: shown.status(STATUS, [HANDOFF]), 7),
    ],
    ids=["line", "handoffs", "story", "verdict", "status"],
)
def test_no_text_of_others_reaches_the_terminal_as_it_is(
    what: Any,  # noqa: ANN401 - makes what is shown
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = printed(what(), monkeypatch)
    assert text.replace("\n", "").isprintable()
    assert text.count(TOLD) == times


@pytest.mark.parametrize(
    "text",
    [EVIL, "\x7f\x80\x9f\xa0", "\u202e\u2028\ufeff", "\U000e0001", "\ud800", "plain, Grüße, 漢字, \\x7f"],
)
def test_json_of_others_means_what_it_meant_and_has_nothing_that_a_terminal_obeys(text: str) -> None:
    for indent in (None, 2):
        written = json.dumps({text: [text]}, indent=indent, ensure_ascii=False)
        told = printable_json(written)
        assert told.replace("\n", "").isprintable()
        assert json.loads(told) == {text: [text]}
        assert told.count("\n") == written.count("\n")
        assert (told == written) == written.replace("\n", "").isprintable()


def test_a_traceback_has_its_lines() -> None:
    line = shown.log_line({"event": "it.failed", "exception": "Traceback\n  \x1b[2J\nValueError: no\n"})
    assert line.plain.endswith("exception=Traceback\n  \\x1b[2J\nValueError: no\n")


def test_the_sentence_of_a_refusal_is_shown_the_same_way() -> None:
    class Answer(io.BytesIO):
        """What was answered."""

    lines = caller._told(Answer(b'{"error": "one\\n\\u001b[2J"}'))  # type: ignore[arg-type]
    assert lines == "one\n\\x1b[2J"
