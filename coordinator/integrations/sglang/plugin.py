"""The entry point: SGLang calls ``register`` in each of its processes, before it starts."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from coordinator.errors import ConfigError
from coordinator.integrations.sglang.hooks import Hooks
from coordinator.integrations.sglang.settings import PluginSettings
from coordinator.integrations.sglang.watched import Poll

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The versions that this was made for, and is tested with.
VERSIONS: Final = ("0.5.23",)
_SRT: Final = "sglang.srt."
_SCHEDULER: Final = _SRT + "managers.scheduler"
_MIXIN: Final = _SRT + "disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_MANAGER: Final = _SRT + "disaggregation.common.conn.CommonKVManager."
_RECEIVER: Final = _SRT + "managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
#: What is hooked: the target, the kind of hook, and the function of ``Hooks``.
TARGETS: Final[Mapping[str, tuple[str, str]]] = {
    _RECEIVER + "recv_requests": ("AROUND", "receive"),
    _MIXIN + "send_kv_chunk": ("AROUND", "send"),
    _MIXIN + "process_disagg_prefill_inflight_queue": ("AROUND", "in_flight"),
    _SRT + "disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group": ("AROUND", "poll"),
    _MANAGER + "__init__": ("AFTER", "manager_made"),
    _MANAGER + "update_status": ("AFTER", "status_updated"),
    _MANAGER + "_maybe_ack_drained_abort": ("AFTER", "room_drained"),
}

logger = logging.getLogger(__name__)


def register() -> Hooks | None:
    """Hook SGLang, if ``KV_COORDINATOR`` is set and this is a process with a scheduler.

    Returns:
        the hooks, or None when there are none; the log says why, if that may surprise.

    """
    try:
        settings = PluginSettings.read()
    except ConfigError as error:
        logger.error("kv-coordinator does nothing here: %s", error)  # noqa: TRY400 - the text says it all
        return None
    if not settings.address or _SCHEDULER not in sys.modules:
        return None
    problem = _foreign()
    if problem:
        logger.error("kv-coordinator does nothing here: %s", problem)
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(settings, lambda: _unhooked(HookRegistry))
    for target, (kind, name) in TARGETS.items():
        HookRegistry.register(target, getattr(hooks, name), HookType[kind])
    return hooks


def _foreign() -> str:
    """Say why this SGLang is not one that we know."""
    import sglang
    from sglang.srt.disaggregation.base.conn import KVPoll

    version = sglang.__version__
    if version not in VERSIONS:
        return (
            f"this is SGLang {version}, and this version of kv-coordinator was made for "
            f"{', '.join(VERSIONS)}; SGLang runs on without it"
        )
    names = ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")
    if [int(getattr(KVPoll, name)) for name in names] != list(Poll):
        return f"SGLang {version} numbers the states of its senders in another way than it did"
    return ""


def _unhooked(registry: Any) -> str:  # noqa: ANN401 - SGLang's class
    """Say what SGLang did not let us hook: it only logs that by itself."""
    missing = sorted(set(TARGETS) - registry._patched)  # noqa: SLF001 - there is no other way to ask
    return f"SGLang did not apply the hooks on {', '.join(missing)}; see its log" if missing else ""
