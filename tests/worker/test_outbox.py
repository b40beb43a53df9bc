"""Reports on their way: in order, with one wake-up, and never to a descriptor of somebody else."""

from __future__ import annotations

import os
import select

import pytest

from coordinator.messages import MoveSettled
from coordinator.worker.outbox import Outbox


def readable(outbox: Outbox) -> bool:
    """Whether the owner would wake."""
    return bool(select.select([outbox.fileno()], [], [], 0.0)[0])


def test_reports_come_in_order_and_wake_their_owner() -> None:
    outbox = Outbox()
    assert not readable(outbox)
    reports = [MoveSettled(number) for number in range(5)]
    for report in reports:
        outbox.put(report)
    assert readable(outbox)
    outbox.rest()
    assert not readable(outbox)
    assert outbox.take(3) == reports[:3]
    assert outbox.take(3) == reports[3:]
    assert not outbox
    outbox.put(reports[0])
    assert readable(outbox)
    outbox.close()


def test_a_report_that_comes_late_is_written_to_nothing() -> None:
    outbox = Outbox()
    number = outbox.fileno()
    outbox.close()
    outbox.close()
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    assert other == number
    outbox.put(MoveSettled(1))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    os.close(other)
    assert outbox
