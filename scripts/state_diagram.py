# ruff: noqa: INP001 - scripts/ holds programs and is no package
"""Draws the state machine of a handoff into ``docs/state-machine.md``.

The table says which events a state knows, not where they lead. So that the page cannot say anything that
the machine does not do, its arrows are found by trying: every sequence of a few events is fed to machines
of one and of two prefill ranks (and one decode rank), and what each event does in each state is noted.
One page per rank is enough to see everything.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Final, get_args

from coordinator.errors import InvalidTransitionError
from coordinator.events import (
    Aborted,
    Event,
    Extended,
    Inherited,
    Late,
    Moved,
    MoveFailed,
    MoveQuiet,
    Offered,
    Opened,
    Paired,
    Pairing,
    Refuse,
    Sent,
    State,
)
from coordinator.machine import HandoffMachine
from coordinator.messages import PAGE_BYTES, Role
from coordinator.reasons import Failure, Reason

TARGET: Final = Path(__file__).parent.parent / "docs" / "state-machine.md"
#: Pairing, offer, last chunk, the end of its move, and one event more; longer ways show nothing new.
DEPTH: Final = 5
PAGE: Final = bytes(PAGE_BYTES)
CAUSE: Final = Failure(Reason.TRANSPORT, "", "")
HEAD: Final = """\
# The states of a handoff

`scripts/diagram` writes this page from what `coordinator/machine.py` does; change that, not this.

```mermaid
stateDiagram-v2
"""
TABLE_HEAD: Final = """\
```

What each event does. *refused*: the sender is told, nothing changes. *late*: it is counted and logged and
changes no verdict; in `failed` the end of a move may let its pages go. An empty field is a pair that no
caller may bring about; it raises `InvalidTransitionError` and changes nothing.

"""

#: What an event does in a state: it stays, is refused or late, or leads to another state.
Found = dict[tuple[State, type[Event]], set[str]]


def events(ranks: int) -> tuple[Event, ...]:
    """Everything that may happen between ``ranks`` prefill ranks and one decode rank; the room has a page."""
    sends = [
        Sent(rank, pages, last=last)
        for rank in range(ranks)
        for pages, last in ((PAGE, False), (b"", True), (PAGE, True))
    ]
    return (
        Opened(0),
        *sends,
        Offered(0, PAGE, 0),
        Offered(0, b"", 1),
        Extended(0),
        Paired(Pairing.of(ranks, 1, tuple((rank, 0) for rank in range(ranks)))),
        Inherited(),
        Moved(0),
        Moved(1),
        MoveFailed(0, CAUSE, source_quiet=False, destination_quiet=False),
        MoveQuiet(0, Role.PREFILL),
        Aborted(CAUSE),
    )


def explore() -> Found:
    """Try every event in everything that can be reached by ``DEPTH`` events."""
    found: Found = {}
    for ranks in (1, 2):
        seen: set[bytes] = set()
        machines = {pickle.dumps(HandoffMachine(1, 1))}
        for _ in range(DEPTH):
            seen |= machines
            after = [_try_all(machine, events(ranks), found) for machine in machines]
            machines = set().union(*after) - seen
    return found


def _try_all(machine: bytes, every: tuple[Event, ...], found: Found) -> set[bytes]:
    """Apply each event to a copy of ``machine``; returns what became of the copies."""
    after = set()
    for event in every:
        copy: HandoffMachine = pickle.loads(machine)  # noqa: S301 - pickled a moment ago, in this process
        before = copy.state
        try:
            effects = copy.apply(event)
        except InvalidTransitionError:
            continue
        kinds = {type(effect) for effect in effects}
        if copy.state is not before:
            what = f"→ {copy.state.value}"
        elif Refuse in kinds:
            what = "refused"
        else:
            what = "late" if Late in kinds else "stays"
        found.setdefault((before, type(event)), set()).add(what)
        after.add(pickle.dumps(copy))
    return after


def page(found: Found) -> str:
    """The whole page."""
    return HEAD + _diagram(found) + TABLE_HEAD + _table(found)


def _diagram(found: Found) -> str:
    lines = [f"[*] --> {State.OPEN.value}"]
    for before in State:
        for after in State:
            causes = [
                event.__name__
                for event in get_args(Event)
                if f"→ {after.value}" in found.get((before, event), ())
            ]
            if causes:
                lines.append(f"{before.value} --> {after.value}: {', '.join(causes)}")
    lines += [f"{state.value} --> [*]" for state in State if state.terminal]
    return "".join(f"    {line}\n" for line in lines)


def _table(found: Found) -> str:
    rows = [["event", *(state.value for state in State)], ["---"] * (len(State) + 1)]
    for event in get_args(Event):
        cells = [", ".join(sorted(found.get((state, event), ()))) for state in State]
        rows.append([f"`{event.__name__}`", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(explore()), encoding="utf-8")
    print(TARGET)
