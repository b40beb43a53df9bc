"""The scheduler's half: which requests are handed over, and which of vLLM's blocks these have.

It has no socket. What it decides goes to all ranks, as orders in the metadata of the next step; what has
ended comes back with a step's output, when it has ended on all ranks.

A block of vLLM is a page here. A request's room is its transfer id's, for vLLM adds random endings to
request ids. One request at a time has a room in an engine; another one with the same transfer id is served
as if it had none: decode computes it, and prefill says nothing about it in its answer.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from coordinator.integrations.vllm.orders import Cancel, Extend, Offer, Open, Send
from coordinator.integrations.vllm.rooms import room_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from coordinator.integrations.vllm.orders import Order
    from coordinator.integrations.vllm.settings import ConnectorSettings

#: The ends of a request at prefill after which its blocks hold the KV of its whole prompt.
_COMPLETE: Final = {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"}
#: So many rooms are remembered that are over here.
_REMEMBERED: Final = 1024

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What is used of vLLM's ``Request``."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    status: Any


@dataclass(slots=True)
class Tracked:
    """A request that is handed over.

    Attributes:
        request: vLLM's id.
        transfer: its transfer id, as the client gave it.
        room: the coordinator's name for it.
        coordinator: whose it is.
        promised: its blocks are held until the ranks report it.
        told_s: when decode has last said that it is still queued.

    """

    request: str
    transfer: str
    room: int
    coordinator: str
    promised: bool = False
    told_s: float = 0.0


class SchedulerHalf(ABC):
    """What both sides have in common. All calls come from the scheduler's thread."""

    def __init__(self, settings: ConnectorSettings, block_tokens: int) -> None:
        """Know of no request; ``block_tokens`` is how many tokens a block has."""
        self._settings = settings
        self._block_tokens = block_tokens
        self._requests: dict[str, Tracked] = {}
        self._rooms: dict[int, str] = {}
        self._orders: list[Order] = []
        self._over: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def busy(self) -> bool:
        """Whether vLLM must go on stepping: there is something to tell, or to be told."""
        return bool(self._orders) or any(tracked.promised for tracked in self._requests.values())

    def orders(self) -> list[Order]:
        """Return what the ranks are to do in this step."""
        orders, self._orders = self._orders, []
        return orders

    def ended(self, requests: Iterable[str]) -> None:
        """Take that the blocks of these requests are quiet on all ranks."""
        for request in requests:
            self._forget(request)
            # vLLM says that a request has ended before it says that its blocks are quiet.
            self._orders = [order for order in self._orders if order.request != request]

    @abstractmethod
    def arrived(self, request: Request) -> None:
        """Take a request that vLLM has queued."""

    def matched(self, request: Request, computed: int) -> int:
        """Return how many tokens, behind the ``computed`` ones, come from elsewhere; 0 for none."""
        del request, computed
        return 0

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """Take the blocks of a request, of which ``external`` tokens come from elsewhere."""
        del request, blocks, external

    @abstractmethod
    def finished(self, request: Request, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Take a request's end; returns whether its blocks must be held, and what its client is told."""

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _track(self, request: Request, transfer: str, coordinator: str) -> Tracked | None:
        """Begin with a request, unless another one has its room."""
        room = room_of(transfer)
        if room in self._rooms:
            logger.error(
                "request %s has the transfer id of %s, which is not over: it is not handed over",
                request.request_id, self._rooms[room],
            )  # fmt: skip
            return None
        tracked = Tracked(request.request_id, transfer, room, coordinator)
        self._rooms[room] = tracked.request
        self._requests[tracked.request] = tracked
        return tracked

    def _forget(self, request: str) -> None:
        tracked = self._requests.pop(request, None)
        if tracked is not None:
            del self._rooms[tracked.room]
            self._over.append(tracked.room)

    def _cancel(self, tracked: Tracked, status: str) -> None:
        why = f"request {tracked.request} ended as {status} before it was handed over"
        self._orders.append(Cancel(tracked.request, tracked.room, tracked.coordinator, why))


class PrefillHalf(SchedulerHalf):
    """Of a prefill engine (``kv_producer``)."""

    def arrived(self, request: Request) -> None:
        """See ``SchedulerHalf``."""
        wanted = request.kv_transfer_params
        if not isinstance(wanted, Mapping) or not wanted.get("do_remote_decode"):
            return
        transfer = str(wanted.get("transfer_id") or uuid.uuid4().hex)
        tracked = self._track(request, transfer, self._settings.coordinators[0])
        if tracked is not None:
            self._orders.append(Open(tracked.request, tracked.room, tracked.coordinator))

    def finished(self, request: Request, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``SchedulerHalf``."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False, None
        pages = list(blocks[: self._blocks_of(request.num_prompt_tokens)])
        if request.status.name not in _COMPLETE or len(pages) < self._blocks_of(request.num_prompt_tokens):
            self._cancel(tracked, request.status.name)
            self._forget(request.request_id)
            return False, None
        tracked.promised = True
        self._orders.append(Send(tracked.request, tracked.room, tracked.coordinator, pages))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": tracked.transfer,
            "coordinator": self._settings.advertise,
            "prompt_tokens": request.num_prompt_tokens,
        }


class DecodeHalf(SchedulerHalf):
    """Of a decode engine (``kv_consumer``)."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See ``SchedulerHalf``; ``clock`` tells seconds."""
        super().__init__(settings, block_tokens)
        self._clock = clock

    def arrived(self, request: Request) -> None:
        """See ``SchedulerHalf``."""
        wanted = request.kv_transfer_params
        if not isinstance(wanted, Mapping) or not wanted.get("do_remote_prefill"):
            return
        problem = self._unreachable(wanted)
        if problem:
            logger.error("request %s is computed here: %s", request.request_id, problem)
            return
        transfer = str(wanted["transfer_id"])
        coordinator = wanted.get("coordinator") or self._settings.coordinators[0]
        problem = self._unwanted(request, wanted)
        if problem:
            self._decline(request, room_of(transfer), coordinator, problem)
            return
        tracked = self._track(request, transfer, coordinator)
        if tracked is not None:
            tracked.told_s = self._clock()

    def matched(self, request: Request, computed: int) -> int:
        """See ``SchedulerHalf``."""
        tracked = self._requests.get(request.request_id)
        return 0 if tracked is None or tracked.promised else max(0, request.num_prompt_tokens - computed)

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """See ``SchedulerHalf``."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.promised or external <= 0:
            return
        prefix = (request.num_prompt_tokens - external) // self._block_tokens
        pages = list(blocks[prefix : self._blocks_of(request.num_prompt_tokens)])
        tracked.promised = True
        self._orders.append(Offer(tracked.request, tracked.room, tracked.coordinator, pages, prefix))

    def finished(self, request: Request, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``SchedulerHalf``. vLLM itself holds the blocks of what waits for KV."""
        del blocks
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            # Also after a failure: vLLM calls this before it tells us. The ranks know what is over.
            self._cancel(tracked, request.status.name)
            if not tracked.promised:
                self._forget(request.request_id)
        return False, None

    def orders(self) -> list[Order]:
        """See ``SchedulerHalf``; also says of what is still queued that it is."""
        now_s = self._clock()
        for tracked in self._requests.values():
            if not tracked.promised and now_s - tracked.told_s >= self._settings.queued_s:
                tracked.told_s = now_s
                self._orders.append(Extend(tracked.request, tracked.room, tracked.coordinator))
        return super().orders()

    def _decline(self, request: Request, room: int, coordinator: str, why: str) -> None:
        """Have prefill's blocks come back at once, unless the handoff is over, or another request's."""
        logger.warning("request %s does not take its KV: %s", request.request_id, why)
        if room not in self._rooms and room not in self._over:
            self._orders.append(Cancel(request.request_id, room, coordinator, why))

    @staticmethod
    def _unwanted(request: Request, wanted: Mapping[str, Any]) -> str:
        """Say why a request's KV is of no use here."""
        tokens = wanted.get("prompt_tokens")
        if getattr(request, "abort_immediately", False):
            # This is how vLLM tells of a request that its server has refused, or has answered with an error.
            return "it was refused, or has failed"
        if tokens is not None and tokens != request.num_prompt_tokens:
            return f"prefill had a prompt of {tokens} tokens, this one has {request.num_prompt_tokens}"
        return ""

    def _unreachable(self, wanted: Mapping[str, Any]) -> str:
        """Say why a request's KV cannot come from elsewhere."""
        coordinator = wanted.get("coordinator")
        known = self._settings.coordinators
        if not wanted.get("transfer_id"):
            return "its kv_transfer_params have no transfer_id"
        if coordinator is None and len(known) > 1:
            return "its kv_transfer_params do not name one of our coordinators"
        if coordinator is not None and coordinator not in known:
            return f"its coordinator is {coordinator!r}, and this engine talks to {', '.join(known)} only"
        return ""
