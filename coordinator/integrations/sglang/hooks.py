"""The functions that stand around SGLang's. Each is thin; ``link`` has the thoughts.

They call only the original that they are given: what they would import by name is hooked as well.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from coordinator.errors import CoordinatorError
from coordinator.integrations.sglang.carrier import RID, Carrier
from coordinator.integrations.sglang.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.integrations.sglang.settings import PluginSettings

#: Ranks that ask each other nothing drift apart; so many steps with something in flight, then they meet.
STEPS_APART: Final = 64

logger = logging.getLogger(__name__)


class Hooks:
    """The hooks of one process, which has one scheduler.

    Attributes:
        link: its tie to the coordinator, once its manager is made.

    """

    def __init__(self, settings: PluginSettings, usable: Callable[[], str]) -> None:
        """``usable()`` says why this process cannot take part; empty: it can."""
        self.link: Link | None = None
        self._settings = settings
        self._usable = usable
        self._steps = 0

    def manager_made(self, _result: object, manager: Any, *_: object, **__: object) -> None:  # noqa: ANN401 - SGLang's class, which must not be imported here
        """After ``CommonKVManager.__init__``: join the coordinator."""
        if manager.disaggregation_mode.value != "prefill":
            return
        problem = self._usable() or _unfit(manager)
        if problem:
            logger.error("kv-coordinator does nothing here: %s", problem)
            return
        if self.link is not None:
            self.link.close()
            self.link = None
        data_parallel = manager.attn_dp_rank if manager.attn_dp_size > 1 else manager.system_dp_rank
        try:
            self.link = Link(
                manager,
                self._settings.address,
                f"{self._settings.prefix}-{manager.bootstrap_port}-dp{data_parallel}",
                manager.attn_cp_rank * manager.attn_tp_size + manager.attn_tp_rank,
                manager.attn_cp_size * manager.attn_tp_size,
                self._settings.client,
            )
        except CoordinatorError as error:
            logger.error("kv-coordinator does nothing here: %s", error)  # noqa: TRY400 - the text says it all

    def receive(
        self, original: Callable[..., list[Any]], receiver: object, local_reqs: list[Any] | None = None
    ) -> list[Any]:
        """Around ``SchedulerRequestReceiver.recv_requests``: rank 0's carrier goes out, and is applied."""
        link = self.link
        if link is None:
            return original(receiver, local_reqs)
        carrier = link.news() if link.leads else None
        if carrier is not None:
            from sglang.srt.managers.io_struct import AbortReq

            local_reqs = [*(local_reqs or ()), AbortReq(rid=RID, abort_message=carrier.text())]
        received = original(receiver, local_reqs)
        if received:
            _apply_carriers(link, received)
        return received

    def send(
        self,
        original: Callable[..., None],
        scheduler: object,
        req: Any,  # noqa: ANN401 - SGLang's class
        last_chunk: bool = False,  # noqa: FBT001, FBT002 - as SGLang has it
        *rest: object,
        **more: object,
    ) -> None:
        """Around ``send_kv_chunk``: with the last chunk, prefill is complete."""
        link, sender = self.link, req.disagg_kv_sender
        watched = link.begin(sender) if link is not None and last_chunk and _is_real(sender) else None
        original(scheduler, req, last_chunk, *rest, **more)
        if link is not None and watched is not None:
            link.begun(watched)

    def in_flight(
        self,
        original: Callable[..., list[Any]],
        scheduler: Any,  # noqa: ANN401 - SGLang's class
        *rest: object,
        **more: object,
    ) -> list[Any]:
        """Around ``process_disagg_prefill_inflight_queue``: nothing to do unless something was applied."""
        link = self.link
        queue = scheduler.disagg_prefill_inflight_queue
        if link is None or not queue:
            return original(scheduler, *rest, **more)
        link.sweep()
        if link.on:
            self._meet(scheduler)
            # What is not the coordinator's is polled, as ever.
            if not link.due and len(queue) == link.waiting:
                return []
            link.due = False
            link.inside = True
        try:
            done = original(scheduler, *rest, **more)
        finally:
            link.inside = False
        if done:
            link.retired(req.disagg_kv_sender for req in done)
        return done

    def poll(
        self, original: Callable[..., list[int]], pollers: list[Any], *rest: object, **more: object
    ) -> list[int]:
        """Around ``poll_and_all_reduce_attn_cp_tp_group``: the answers are there already."""
        link = self.link
        if link is None or not link.inside:
            return original(pollers, *rest, **more)
        link.inside = False  # Only this once: what the scheduler asks meanwhile is about others.
        answers = [link.answer(sender) for sender in pollers]
        if len(answers) - answers.count(None) < link.waiting:
            link.retired_all_but(pollers)
        others = [sender for sender, answer in zip(pollers, answers, strict=True) if answer is None]
        polled = iter(original(others, *rest, **more) if others else ())
        return [next(polled) if answer is None else int(answer) for answer in answers]

    def status_updated(self, _result: object, manager: object, bootstrap_room: int, status: int) -> None:
        """After ``CommonKVManager.update_status``, on any thread: is a transfer over?"""
        if status in {0, 4}:
            self._look(manager, bootstrap_room)

    def room_drained(self, _result: object, manager: object, room: int) -> None:
        """After ``CommonKVManager._maybe_ack_drained_abort``, on any thread: one is done with."""
        self._look(manager, room)

    def _look(self, manager: object, room: int) -> None:
        link = self.link
        if link is None or link.manager is not manager:
            return
        try:
            link.looked_at(room)
        except Exception:  # the door to SGLang's transfer threads, which must not die of us
            logger.exception("room %d: the coordinator was not told how its transfer goes", room)

    def _meet(self, scheduler: Any) -> None:  # noqa: ANN401 - SGLang's class
        link = self.link
        self._steps += 1
        if link is None or self._steps % STEPS_APART or link.world_size == 1:
            return
        from torch.distributed import barrier, get_world_size

        for group in (scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group):
            if get_world_size(group) > 1:
                barrier(group=group)


def _apply_carriers(link: Link, received: list[Any]) -> None:
    """Take the carriers out of what the scheduler is to see: in place, for it looks at the list itself."""
    carriers = [(index, _carrier_in(item)) for index, item in enumerate(received)]
    for index, carrier in reversed(carriers):
        if carrier is not None:
            del received[index]
    for _, carrier in carriers:
        if carrier is not None:
            link.apply(carrier)


def _carrier_in(item: object) -> Carrier | None:
    """Return the carrier that something received is, if it is one."""
    if getattr(item, "rid", None) != RID:
        return None
    from sglang.srt.managers.io_struct import AbortReq

    return Carrier.read(item.abort_message) if isinstance(item, AbortReq) else None


def _is_real(sender: object) -> bool:
    """Whether it moves pages: warm-up and health checks have one that does not, with the same manager."""
    from sglang.srt.disaggregation.common.conn import CommonKVSender

    return isinstance(sender, CommonKVSender)


def _unfit(manager: Any) -> str:  # noqa: ANN401 - SGLang's class
    if manager.pp_size > 1:
        return f"this engine has {manager.pp_size} pipeline stages, and only one is supported"
    if not manager.supports_deferred_decode_kv_release:
        return f"{type(manager).__name__} cannot tell when a transfer has ended; use nixl or mooncake"
    return ""
