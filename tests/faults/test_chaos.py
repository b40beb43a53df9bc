"""The storm, seed by seed: whatever is lost or killed, all ranks of an engine apply the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from coordinator.handoff import Handoff
from tests.faults.chaos.judge import judge
from tests.faults.chaos.storm import Storm
from tests.service.stage import virtual_time
from tests.support.logs import capture

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: How many lines are shown of the log of a run that failed.
LINES: Final = 400


@virtual_time
async def test_every_rank_applies_the_same_list_whatever_is_lost_or_killed(
    chaos_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases C05 and C30."""
    # The coordinator goes through sets of these: in the same order whenever a seed is repeated.
    monkeypatch.setattr(Handoff, "__hash__", lambda handoff: handoff.room)
    storm = Storm(chaos_seed)
    with capture(now_s=storm.now_s) as storm.log:
        async with storm:
            try:
                await storm.run()
                judge(storm)
            except BaseException:
                dump(storm, tmp_path)
                raise


def dump(storm: Storm, directory: Path) -> None:
    """Say what has happened, and how to see it again."""
    path = directory / f"chaos-{storm.seed}.log"
    lines = [json.dumps(entry, default=str) for entry in storm.log]
    path.write_text("\n".join(lines))
    again = f"scripts/test tests/faults/test_chaos.py -k '[{storm.seed}]' --chaos-seeds {storm.seed + 1}"
    print(*lines[-LINES:], f"the whole log: {path}", f"once more: {again}", sep="\n")  # noqa: T201 - for pytest to show
