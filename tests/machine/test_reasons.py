"""The verdicts: their names are a promise to operators, and a cause survives the wire."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.reasons import Failure, Fault, Reason

#: Stable names: they stand on dashboards and in alerts. Adding one is fine, renaming one is not.
PROMISED = {
    "deadline",
    "stalled",
    "abandoned",
    "connect",
    "transport",
    "peer_lost",
    "peer_restarted",
    "rank_lost",
    "cancelled_by_prefill",
    "cancelled_by_decode",
    "cancelled_by_operator",
    "incompatible",
    "rejected",
    "coordinator_restarted",
    "coordinator_lost",
    "draining",
    "internal",
}


def test_the_names_are_the_promised_ones() -> None:
    assert {reason.value for reason in Reason} == PROMISED


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_says_whose_fault_and_whether_to_try_again(reason: Reason) -> None:
    assert reason.fault in Fault
    assert reason.retryable in {True, False}


@pytest.mark.parametrize(
    ("reason", "fault", "retryable"),
    [
        (Reason.RANK_LOST, Fault.PREFILL, True),
        (Reason.PEER_LOST, Fault.DECODE, True),
        (Reason.TRANSPORT, Fault.TRANSPORT, True),
        (Reason.COORDINATOR_RESTARTED, Fault.COORDINATOR, True),
        (Reason.CANCELLED_BY_DECODE, Fault.CLIENT, False),
        (Reason.INCOMPATIBLE, Fault.CLIENT, False),
        (Reason.REJECTED, Fault.CLIENT, False),
    ],
)
def test_verdicts_that_an_engine_acts_on(reason: Reason, fault: Fault, *, retryable: bool) -> None:
    failure = Failure(reason, "decode-0/1", "why")
    assert (failure.fault, failure.retryable) == (fault, retryable)


def test_what_a_client_gave_up_or_got_wrong_is_not_tried_again() -> None:
    for reason in Reason:
        assert reason.retryable is (reason.fault is not Fault.CLIENT), reason


@pytest.mark.parametrize("reason", Reason)
def test_a_failure_survives_the_wire(reason: Reason) -> None:
    failure = Failure(reason, "prefill-0/3", "page 9 is outside the pool; näher: “9 ≥ 8”")
    frame = msgspec.msgpack.encode(failure)
    assert msgspec.msgpack.decode(frame, type=Failure) == failure


def test_an_unknown_reason_is_refused() -> None:
    frame = msgspec.msgpack.encode(["tired", "prefill-0/3", "why"])
    with pytest.raises(msgspec.ValidationError, match="tired"):
        msgspec.msgpack.decode(frame, type=Failure)
