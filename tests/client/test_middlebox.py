"""A line that a middlebox cuts without a word while nothing is said on it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from coordinator.client import ClientSettings, DecodeRank
from tests.client.engines import Engines
from tests.support.faults import Faults

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.processes import Programs


def test_a_line_that_died_silently_is_noticed_and_made_anew(programs: Programs, short_dir: Path) -> None:
    """Case C45: the next handoff succeeds; no call and no kernel had told that the line is dead."""
    with ExitStack() as stack, Faults() as faults:
        engines = Engines(programs, short_dir, stack)
        engines.hand_over(1)
        line = faults.line(engines.address, f"ipc://{short_dir}/outcomes")
        engines.decode.close()
        engines.decode = stack.enter_context(
            DecodeRank.connect(
                line.address,
                group="d",
                rank=0,
                world_size=1,
                endpoint=engines.endpoint,
                settings=ClientSettings(away_after_s=1.0),
            )
        )
        engines.ready()
        engines.hand_over(2)
        line.vanish()
        engines.hand_over(3)
