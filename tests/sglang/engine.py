"""A prefill engine of real SGLang parts around faked transport. Runs in SGLang's environment only.

Real: the receiver that broadcasts what rank 0 gets, the hooked methods of the scheduler, the senders and
the manager's state. Not real: the model, the pages, and the threads that would move bytes; the one here
keeps SGLang's accounts as NIXL's does, and ends a transfer when the test says so.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.fake.conn import FakeKVSender
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq, sock_send
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel

IN_FLIGHT = (
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
    "process_disagg_prefill_inflight_queue"
)
#: The pause between two steps, seconds: a forward pass.
STEP_S = 0.01
#: How many calls of collectives this process has made.
calls: Counter[str] = Counter()


def count_collectives() -> None:
    """Count from now on."""
    for name in ("all_reduce", "barrier"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **more)

        setattr(dist, name, counted)


def join_world(rank: int, world_size: int, meeting: str) -> SimpleNamespace:
    """Make the process groups, and tell SGLang of them."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    alone = [dist.new_group([other]) for other in range(world_size)]
    get_context().override_server_args(
        host="127.0.0.1", tp_size=world_size, disaggregation_mode="prefill", disaggregation_bootstrap_port=0
    ).install()
    group = SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        cpu_group=dist.group.WORLD,
        ranks=list(range(world_size)),
        world_size=world_size,
    )
    get_parallel().override_permanently(
        tp_rank=rank,
        attn_tp_rank=rank,
        attn_cp_rank=0,
        attn_dp_rank=0,
        attn_dcp_rank=0,
        pp_rank=0,
        pp_group=None,
        tp_group=group,
    )
    return SimpleNamespace(tensor=dist.group.WORLD, context=alone[rank])


class Transport:
    """Stands for NIXL's transfer worker: its accounts, in its order, on a thread of its own."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._orders: queue.Queue[tuple[str, int]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def order(self, what: str, room: int) -> None:
        """``start``, or an end: ``done``; ``failed``; ``early`` and then ``drained``, as with Mooncake.

        ``stick``: hang in the room before, so that whatever comes behind it is not even begun.
        """
        self._orders.put((what, room))

    def _run(self) -> None:
        manager, is_stuck = self._manager, False
        while True:
            what, room = self._orders.get()
            is_stuck = is_stuck or what == "stick"
            if is_stuck or room not in manager.request_status:
                continue
            if what == "start":
                if manager.check_status(room) != KVPoll.Failed:
                    manager._staging_outstanding[room] += 1
                    manager.update_status(room, KVPoll.Transferring)
            elif what == "early":
                manager.conclude_transfer(bootstrap_room=room, status=KVPoll.Success)
            elif what == "failed":
                manager.conclude_failure(bootstrap_room=room, failure_reason="the link broke")
                self._settle(room)
            else:
                self._settle(room)
                if what == "done":
                    manager.conclude_transfer(bootstrap_room=room, status=KVPoll.Success)

    def _settle(self, room: int) -> None:
        self._manager._staging_outstanding[room] -= 1
        self._manager._maybe_ack_drained_abort(room)


class Manager(CommonKVManager):  # type: ignore[misc] # SGLang is not installed here
    """SGLang's manager without a transfer engine."""

    supports_deferred_decode_kv_release = True

    def __init__(self, port: int) -> None:
        args = SimpleNamespace(
            engine_rank=get_parallel().tp_rank,
            kv_cache_dtype_str="auto",
            kv_layout=None,
            kv_item_lens=[1],
            state_item_lens=[],
            state_types=[],
            is_hybrid_mla_backend=False,
            system_dp_rank=0,
            pp_rank=0,
        )
        self._port = port
        super().__init__(args, DisaggregationMode.PREFILL, None)
        self.transport = Transport(self)

    def _sync_bootstrap_port_across_nodes(self, local_port: int) -> int:
        return self._port

    def register_to_bootstrap(self) -> None:
        """There is no bootstrap server."""

    def add_transfer_request(self, bootstrap_room: int, *_: Any, **__: Any) -> None:
        """Take what a sender sends."""
        self.transport.order("start", bootstrap_room)


class TreeCache:
    """Notes when KV is given back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def claim_kv_row(self, req: Any) -> bool:
        """Take over the pages of a request."""
        self._engine.freed[req.bootstrap_room] = self._engine.step_number
        req.kv.holds_kv = False
        req.kv.is_kv_released = True
        return True

    def finish(self, *_: Any) -> None:
        """Nothing to do."""


class Engine(SchedulerDisaggregationPrefillMixin):  # type: ignore[misc] # as above
    """The part of a scheduler that retires what is in flight.

    Attributes:
        done: room -> the step in which it was retired, how, and what its client was told.
        freed: room -> the step in which its pages were given back.
        on_steps: the steps in which the coordinator began (even) or ceased (odd) to decide.

    """

    def __init__(self, rank: int, groups: SimpleNamespace, inbox: str, port: int, decode: int) -> None:
        self.rank = rank
        self.manager = Manager(port)
        self.decode = decode
        self.step_number = 0
        self.done: dict[int, tuple[int, str, str]] = {}
        self.freed: dict[int, int] = {}
        self.switches: list[tuple[int, bool]] = []
        self.stopped = False
        self.counted_from = 0
        self.measured: dict[str, list[float]] = {}
        self.slow_s = 0.0
        context = zmq.Context()
        sockets = [context.socket(zmq.PULL) for _ in range(2)]
        if rank == 0:
            sockets[0].bind(inbox)
        self.receiver = SchedulerRequestReceiver(
            recv_from_tokenizer=sockets[0],
            recv_from_rpc=sockets[1],
            recv_skipper=None,
            input_blocker=None,
            mm_receiver=None,
            server_args=None,
            model_config=SimpleNamespace(is_multimodal=False),
            max_recv_per_poll=-1,
            stream_output=None,
            get_last_batch=lambda: None,
        )
        self.attn_tp_cpu_group = groups.tensor
        self.attn_cp_cpu_group = groups.context
        self.disagg_prefill_inflight_queue: list[Any] = []
        self.disagg_prefill_pending_chunk_rids: set[str] = set()
        self.kv_checksum_computer = None
        self.scheduler_stage_metrics = None
        self.tree_cache = TreeCache(self)
        self.batch_result_processor = None
        self.req_to_token_pool = SimpleNamespace(available_size=lambda: 1)
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(finalize_bootstrap=lambda _: True, queue=[])
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        self.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
        self.output_streamer = SimpleNamespace(stream_output=self._stream)
        self.reqs: dict[int, Any] = {}

    # What the real methods call

    def _send_kv_chunk(self, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        req.disagg_kv_sender.send(np.zeros(1, np.int32))

    def checkpoint_disagg_prefill(self, req: Any) -> None:
        req.pending_bootstrap = False  # finalize_bootstrap, which is not the real one here, would do so

    def _release_aborted_request(self, req: Any) -> None:
        pass

    def _stream(self, reqs: list[Any], *_: Any) -> None:
        for req in reqs:
            reason = req.finished_reason
            message = getattr(reason, "message", "")
            kind = "failed" if message else "succeeded"
            self.done[req.bootstrap_room] = (self.step_number, kind, message)

    # One step

    def step(self) -> None:
        """Receive, take on, retire."""
        self.step_number += 1
        for req in self.receiver.recv_requests(local_reqs=[]):
            self.obey(req.rid)
        self.process_disagg_prefill_inflight_queue()
        time.sleep(STEP_S + self.slow_s)

    def obey(self, command: str) -> None:
        """Do what the test has rank 0 told, on all ranks in the same step."""
        what, *numbers = command.split()
        rooms = [int(number) for number in numbers]
        if what in {"prefill", "park", "bootstrap", "fake", "vanish"}:
            for room in rooms:
                getattr(self, what)(room)
        elif what == "abort":
            for room in rooms:
                self.reqs[room].disagg_kv_sender.abort()  # as Scheduler.abort_request does
        elif what == "measure":
            self.measured = self.measure(rooms[0])
        elif what == "stop":
            self.stopped = True
        else:
            raise ValueError(command)

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Time SGLang's own function and the hooked one in turn, microseconds; nothing is new meanwhile."""
        hooked = SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue
        took: dict[str, list[float]] = {"original": [], "hooked": []}
        for _ in range(rounds):
            for name, function in (("original", hooked.__wrapped__), ("hooked", hooked)):
                started = time.perf_counter_ns()
                function(self)
                took[name].append((time.perf_counter_ns() - started) / 1000)
        return took

    def prefill(self, room: int) -> None:
        """A request whose prefill is complete."""
        sender = CommonKVSender(self.manager, "127.0.0.1:1", room)
        self.bootstrap(room)
        sender.init(1, 0)
        req = self.take_on(room, sender)
        self.send_kv_chunk(req, last_chunk=True)

    def park(self, room: int) -> None:
        """A request whose prefill is complete before decode has been heard of."""
        sender = CommonKVSender(self.manager, "127.0.0.1:1", room)
        sender.init(1, 0)
        self.take_on(room, sender).pending_bootstrap = True

    def bootstrap(self, room: int) -> None:
        """Decode has been heard of."""
        self.manager.transfer_infos[room] = {
            "decode": SimpleNamespace(endpoint="127.0.0.1", dst_port=self.decode, is_dummy=False)
        }
        self.manager.update_status(room, KVPoll.WaitingForInput)

    def fake(self, room: int) -> None:
        """A request of a warm-up, which has a sender that moves nothing."""
        sender = FakeKVSender(self.manager, "", room)
        sender.init(1, 0)
        self.send_kv_chunk(self.take_on(room, sender), last_chunk=True)

    def vanish(self, room: int) -> None:
        """A request that leaves the queue in a way that the plugin does not know."""
        self.disagg_prefill_inflight_queue.remove(self.reqs[room])

    def take_on(self, room: int, sender: Any) -> Any:
        """Put a request into the in-flight queue."""
        req = SimpleNamespace(
            rid=f"rid-{room}",
            bootstrap_room=room,
            bootstrap_host="127.0.0.1",
            disagg_kv_sender=sender,
            pending_bootstrap=False,
            finished_reason=None,
            return_routed_experts=False,
            return_logprob=False,
            skip_radix_cache_insert=False,
            cache_request_handle=None,
            metadata_buffer_index=-1,
            kv=SimpleNamespace(holds_kv=True, is_kv_released=False, holds_mamba=False),
            lock=None,
            time_stats=SimpleNamespace(
                set_prefill_kv_transfer_finish_time=lambda: None,
                set_completion_time=lambda: None,
                compute_and_observe_kv_transfer_metrics=lambda _: None,
                trace_ctx=SimpleNamespace(abort=lambda **_: None),
            ),
        )
        self.reqs[room] = req
        self.disagg_prefill_inflight_queue.append(req)
        return req

    @property
    def link(self) -> Any:
        """The plugin's, if there is one."""
        registered = HookRegistry._hooks.get(IN_FLIGHT)
        return registered[0][1].__self__.link if registered else None

    def note_switch(self) -> None:
        """Note in which step the coordinator begins or ceases to decide."""
        link = self.link
        is_on = link is not None and link.on
        if is_on is not bool(self.switches and self.switches[-1][1]):
            self.switches.append((self.step_number, is_on))

    def report(self) -> dict[str, Any]:
        """What the test wants to know."""
        return {
            "rank": self.rank,
            "step": self.step_number,
            "done": {str(room): done for room, done in self.done.items()},
            "freed": {str(room): step for room, step in self.freed.items()},
            "in_flight": [req.bootstrap_room for req in self.disagg_prefill_inflight_queue],
            "watched": [] if self.link is None else list(self.link._watched),
            "started": list(self.manager._staging_outstanding),
            "calls": dict(calls),
            "switches": self.switches,
            "measured": self.measured,
            "steps_counted": self.step_number - self.counted_from,
        }


class Ear:
    """Where the test speaks to one rank: JSON requests, each answered at once."""

    def __init__(self, address: str, engine: Engine, inbox: str) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.REP)
        self._socket.bind(address)
        self._engine = engine
        if engine.rank == 0:
            self._to_all = context.socket(zmq.PUSH)
            self._to_all.connect(inbox)

    def listen(self) -> None:
        """Obey what the test has said since the last step."""
        while self._socket.poll(0):
            said: Any = self._socket.recv_json()
            self._socket.send_json(self._do(*said))

    def _do(self, what: str, *rest: Any) -> Any:
        engine = self._engine
        if what == "report":
            return engine.report()
        if what == "say":  # to all ranks, in one step
            sock_send(self._to_all, AbortReq(rid=rest[0]))
        elif what == "forget":
            engine.freed.pop(rest[0], None)
            return engine.done.pop(rest[0], (0, None, ""))[1]
        elif what == "slow":
            engine.slow_s = rest[0]
        elif what == "count":
            calls.clear()
            engine.counted_from = engine.step_number
        elif what == "forget measured":
            engine.measured = {}
        else:
            for room in rest:
                engine.manager.transport.order(what, room)
        return None


def run(rank: int, world_size: int, place: str, port: int, decode: int) -> None:
    """Be one rank, until told to stop."""
    groups = join_world(rank, world_size, f"{place}/meeting")
    count_collectives()
    load_plugins()
    engine = Engine(rank, groups, f"ipc://{place}/inbox", port, decode)
    ear = Ear(f"ipc://{place}/rank-{rank}", engine, f"ipc://{place}/inbox")
    while not engine.stopped:
        ear.listen()
        engine.step()
        engine.note_switch()
    dist.barrier()
