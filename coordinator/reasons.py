"""The verdicts: why a handoff failed, whose fault it was, and whether to try again.

The names are stable: they stand on the wire, in metrics and in logs.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Fault(StrEnum):
    """Whose side the cause is on."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRANSPORT = "transport"
    COORDINATOR = "coordinator"
    CLIENT = "client"


class Reason(StrEnum):
    """Why a handoff failed."""

    DEADLINE = "deadline"
    STALLED = "stalled"
    ABANDONED = "abandoned"
    CONNECT = "connect"
    TRANSPORT = "transport"
    PEER_LOST = "peer_lost"
    PEER_RESTARTED = "peer_restarted"
    RANK_LOST = "rank_lost"
    CANCELLED_BY_PREFILL = "cancelled_by_prefill"
    CANCELLED_BY_DECODE = "cancelled_by_decode"
    CANCELLED_BY_OPERATOR = "cancelled_by_operator"
    INCOMPATIBLE = "incompatible"
    REJECTED = "rejected"
    COORDINATOR_RESTARTED = "coordinator_restarted"
    COORDINATOR_LOST = "coordinator_lost"
    DRAINING = "draining"
    INTERNAL = "internal"

    @property
    def fault(self) -> Fault:
        """Whose fault a failure with this reason is."""
        return _VERDICTS[self][0]

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is tried again, perhaps elsewhere."""
        return _VERDICTS[self][1]


_VERDICTS: dict[Reason, tuple[Fault, bool]] = {
    Reason.DEADLINE: (Fault.DECODE, True),
    Reason.STALLED: (Fault.TRANSPORT, True),
    Reason.ABANDONED: (Fault.PREFILL, True),
    Reason.CONNECT: (Fault.TRANSPORT, True),
    Reason.TRANSPORT: (Fault.TRANSPORT, True),
    Reason.PEER_LOST: (Fault.DECODE, True),
    Reason.PEER_RESTARTED: (Fault.DECODE, True),
    Reason.RANK_LOST: (Fault.PREFILL, True),
    Reason.CANCELLED_BY_PREFILL: (Fault.CLIENT, False),
    Reason.CANCELLED_BY_DECODE: (Fault.CLIENT, False),
    Reason.CANCELLED_BY_OPERATOR: (Fault.CLIENT, False),
    Reason.INCOMPATIBLE: (Fault.CLIENT, False),
    Reason.REJECTED: (Fault.CLIENT, False),
    Reason.COORDINATOR_RESTARTED: (Fault.COORDINATOR, True),
    Reason.COORDINATOR_LOST: (Fault.COORDINATOR, True),
    Reason.DRAINING: (Fault.COORDINATOR, True),
    Reason.INTERNAL: (Fault.COORDINATOR, True),
}


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The cause of a failed handoff, as every rank of both groups hears it.

    Attributes:
        reason: the stable name.
        origin: the rank the cause came from, as ``group/rank``; empty when it is no single rank's.
        message: a sentence a person can act on.

    """

    reason: Reason
    origin: str
    message: str

    @property
    def fault(self) -> Fault:
        """Whose fault it is."""
        return self.reason.fault

    @property
    def retryable(self) -> bool:
        """Whether trying again may help."""
        return self.reason.retryable
