"""What an engine imports: its side of the handoff, in one small process-wide client."""

from coordinator.client.endpoint import Endpoint
from coordinator.client.pool import KVPool
from coordinator.client.rank import DecodeRank, PrefillRank
from coordinator.client.settings import ClientSettings
from coordinator.client.standing import RankState
from coordinator.client.supervised import SupervisedRank
from coordinator.layout import Extra, Layout
from coordinator.messages import Outcome, Refused, Released
from coordinator.reasons import Failure, Fault, Reason

__all__ = [
    "ClientSettings",
    "DecodeRank",
    "Endpoint",
    "Extra",
    "Failure",
    "Fault",
    "KVPool",
    "Layout",
    "Outcome",
    "PrefillRank",
    "RankState",
    "Reason",
    "Refused",
    "Released",
    "SupervisedRank",
]
