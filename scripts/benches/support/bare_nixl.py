"""Bare NIXL: one prepared list for each pool, one request for each handoff, polled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from backends.nixl import Options
from backends.nixl_engine import load_bindings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from scripts.benches.support.bare import Memory

_PLUGIN: Final = "UCX"
#: Pause of the receiver's progress thread, as in the backend.
_PROGRESS_US: Final = 1000


class Agent:
    """A native agent, whose pool is registered and prepared."""

    def __init__(
        self, name: str, options: Mapping[str, object], memory: Memory, progress_us: int | None
    ) -> None:
        """Start it; without ``progress_us`` it has no thread of its own."""
        self.bindings: Any = load_bindings(msgspec.convert(dict(options), Options).environment())
        config = self.bindings.nixlAgentConfig()
        config.useListenThread = False
        config.useProgThread = progress_us is not None
        config.pthrDelay = progress_us or 0
        config.syncMode = self.bindings.NIXL_THREAD_SYNC_NONE
        self.native = self.bindings.nixlAgent(name, config)
        self.plugins = [self.native.createBackend(_PLUGIN, {})]
        self.segment = self.bindings.DRAM_SEG
        row = (memory.address, memory.size_bytes, 0, "")
        self.native.registerMem(self.bindings.nixlRegDList(self.segment, [row]), self.plugins)

    def prepare(self, agent: str, address: int, memory: Memory) -> int:
        """Prepare all blocks of a pool that is at ``address`` in the process of ``agent``."""
        row = (address, memory.block_bytes, 0, memory.block_bytes, memory.count)
        rows = np.array([row], np.uint64)
        return int(self.native.prepXferDlist(agent, self.segment, rows, self.plugins))


class Receiver:
    """Memory that others write into."""

    def __init__(self, options: Mapping[str, object], memory: Memory) -> None:
        """Register it."""
        self._agent: Agent | None = Agent("bare-receiver", options, memory, _PROGRESS_US)
        self.address = msgspec.msgpack.encode((bytes(self._agent.native.getLocalMD()), memory.address))

    def close(self) -> None:
        """Give the memory back."""
        self._agent = None


class Sender:
    """Writes into one receiver."""

    def __init__(self, options: Mapping[str, object], memory: Memory, address: bytes) -> None:
        """Register the memory and meet the receiver."""
        metadata, remote_address = msgspec.msgpack.decode(address)
        self._agent: Agent | None = Agent("bare-sender", options, memory, None)
        peer = self._agent.native.loadRemoteMD(metadata).decode()
        self._memory = memory
        self._source = self._agent.prepare(self._agent.bindings.NIXL_INIT_AGENT, memory.address, memory)
        self._destination = self._agent.prepare(peer, remote_address, memory)

    def post(self, source_pages: NDArray[np.int32], destination_pages: NDArray[np.int32]) -> int:
        """Start to write pages."""
        agent = self._living()
        request = agent.native.makeXferReq(
            agent.bindings.NIXL_WRITE,
            self._source,
            self._memory.blocks(source_pages),
            self._destination,
            self._memory.blocks(destination_pages),
            "",
            agent.plugins,
        )
        agent.native.postXferReq(request, "")
        return int(request)

    def done(self, transfer: int) -> bool:
        """Whether all of it has arrived."""
        agent = self._living()
        if agent.native.getXferStatus(transfer) != agent.bindings.NIXL_SUCCESS:
            return False
        agent.native.releaseXferReq(transfer)
        return True

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        if self._agent is not None:
            self._agent.native.releasedDlistH(self._source)
            self._agent.native.releasedDlistH(self._destination)
            self._agent = None

    def _living(self) -> Agent:
        if self._agent is None:
            message = "the sender is closed"
            raise RuntimeError(message)
        return self._agent
