"""The prefill node is cut off from decode, and back after decode has given it up."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from coordinator.client import Reason
from tests.client.deployment import Deployment
from tests.support.faults import Faults

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faults import Line
    from tests.support.processes import Programs


def test_a_node_that_is_cut_off_and_back_after_the_verdict(programs: Programs, short_dir: Path) -> None:
    """All decode ranks fail its rooms in one step; nothing that arrives late changes anything."""
    lines: list[Line] = []
    with ExitStack() as stack, Faults() as faults:

        def way(address: str) -> str:
            if not lines:
                lines.append(faults.line(address, f"ipc://{short_dir}/outcomes"))
            return lines[0].address

        deployment = Deployment(programs, short_dir, stack, "loopback", way)
        decode = deployment.decode
        deployment.hand_over(1, 1)
        deployment.offer(2, 2)
        deployment.send(3, 3)
        for line in lines:
            line.refuse()
        deployment.offer(3, 3)
        deployment.run(
            lambda: list(decode.outcomes().values()).count(Reason.COORDINATOR_LOST) == 2, "decode has lost it"
        )
        lost = {(1, 1): None, (2, 1): Reason.COORDINATOR_LOST, (3, 1): Reason.COORDINATOR_LOST}
        assert decode.outcomes() == lost
        assert [{event.room for event in step} for step in decode.steps if len(step) > 1][-1] == {2, 3}
        deployment.run(lambda: len(decode.released()) == 3, "its pages are back")
        before = [pool.tensor.clone() for pool in decode.pools]
        for line in lines:
            line.heal()
        deployment.ready()
        deployment.hand_over(4, 4)
        assert {key: decode.outcomes()[key] for key in lost} == lost
        assert len(decode.outcomes()) == 4
        for pool, tensor in zip(decode.pools, before, strict=True):
            assert bool((pool.tensor[:, :4] == tensor[:, :4]).all())
