"""What has vLLM's processes sleep while they wait for one another, instead of spinning.

An engine of two ranks is three processes that yield their core in a loop for a second after each message
between them, and its ranks reduce through shared memory, which spins in native code. Two such engines on
two cores yield to one another some 100,000 times a second; on a virtual machine nothing else gets on then,
for minutes. vLLM can do without both: its queues also wake their readers (nearly always, so these look now
and then), and where ranks share no memory it reduces through gloo.

Runs in all processes of an engine, as one of vLLM's plugins.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Sleeping(shm_broadcast.SpinCondition):  # type: ignore[misc] # vLLM is not there where this is checked
    """What a queue's readers wait on; spins for no time."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{**more, "busy_loop_s": 0.0})


def register() -> None:
    """Put the sleeping ones in the places of those that spin."""
    assert hasattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name")
    shm_broadcast.SpinCondition = Sleeping
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
