"""A TCP line that a test can cut, stall, delay, refuse and heal, each direction by itself.

It lives in a thread of its own (see ``lines.Faults``), so that neither a test that blocks nor an
event loop of a test disturbs it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, TypeVar

from tests.support.faults.zmtp import Splitter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.support.faults.zmtp import Rewrite

_CHUNK_BYTES: Final = 1 << 16
#: Chunks that are under way in one direction; behind them the sender waits.
_MAX_CHUNKS: Final = 64
_CALL_S: Final = 10.0
_NO_BOUND: Final = 1 << 62

T = TypeVar("T")


class Way:
    """One direction of a proxy, over all its connections.

    Attributes:
        delay_s: how long each byte takes.
        rewrite: what becomes of each ZeroMQ message, if set; for connections that begin after that.
        passed_bytes: how many have gone through.

    """

    def __init__(self, call: Callable[[Callable[[], None]], None]) -> None:
        """``call`` runs something in the proxy's thread."""
        self.delay_s = 0.0
        self.rewrite: Rewrite | None = None
        self.passed_bytes = 0
        self._call = call
        self._open = asyncio.Event()
        self._open.set()
        self._bound_bytes = _NO_BOUND

    def stall(self, after_bytes: int = 0) -> None:
        """Let nothing through, though the connections stay: the sender's buffers fill up.

        With ``after_bytes``, each connection that begins now still gets that many through.
        """
        if after_bytes:
            self._bound_bytes = after_bytes
        else:
            self._call(self._open.clear)

    def heal(self) -> None:
        """Let everything through, what was held back first, at once."""
        self.delay_s = 0.0
        self._bound_bytes = _NO_BOUND
        self._call(self._open.set)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection's bytes to its end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, under_way))
            group.create_task(self._write(writer, under_way))

    async def _read(
        self, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        now_s = asyncio.get_running_loop().time
        bound_bytes = self._bound_bytes
        splitter = None if self.rewrite is None else Splitter(self.rewrite)
        while bound_bytes:
            await self._open.wait()
            data = (await reader.read(_CHUNK_BYTES))[:bound_bytes]
            if bound_bytes < _NO_BOUND:
                bound_bytes -= len(data)
            arrived = splitter.feed(data) if splitter else data
            # Nothing at all stands for the end.
            if arrived or not data:
                await under_way.put((now_s() + self.delay_s, arrived))
            if not data:
                return
        await asyncio.Event().wait()  # stalled for good

    async def _write(
        self, writer: asyncio.StreamWriter, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            await self._open.wait()
            if not data and writer.can_write_eof():
                writer.write_eof()
                return
            self.passed_bytes += len(data)
            writer.write(data)
            await writer.drain()


class Proxy:
    """A line from any number of clients to one address.

    Attributes:
        address: what clients connect to, ``tcp://127.0.0.1:PORT``.
        up: the direction from the clients.
        down: the direction to the clients.
        accepted: how many connections there ever were.

    """

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        """Listen on a free port, in ``loop``, which runs in another thread.

        Args:
            target: ``tcp://host:port`` or ``ipc:///path``; need not be there yet.
            loop: where everything happens.

        """
        self._target = target
        self._loop = loop
        # It never listens: it keeps the port ours while connections are refused.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._port.getsockname()[1]}"
        self.accepted = 0
        self.up, self.down = Way(self._soon), Way(self._soon)
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._vanished: list[list[asyncio.StreamWriter]] = []
        self._call(self._listen())

    def cut(self) -> None:
        """End every connection, at both ends; new ones are welcome."""
        self._call(self._cut())

    def vanish(self) -> None:
        """Let every connection die without a word, as a middlebox does: neither end is told.

        Nothing goes through them any more, new ones are welcome. What is sent is still confirmed by
        the kernel, so TCP itself notices nothing.
        """
        self._call(self._vanish())

    def stall(self) -> None:
        """Let nothing through in either direction, though the connections stay."""
        self.up.stall()
        self.down.stall()

    def delay(self, delay_s: float) -> None:
        """Let each byte take that long in each direction."""
        self.up.delay_s = self.down.delay_s = delay_s

    def refuse(self) -> None:
        """End every connection, and refuse new ones."""
        self._call(self._refuse())

    def heal(self) -> None:
        """Be a good line again. What was cut or vanished stays so; what was stalled goes on."""
        self.up.heal()
        self.down.heal()
        self._call(self._listen())

    def close(self) -> None:
        """End everything."""
        self._call(self._close())

    # --- in the loop's thread ----------------------------------------------------------------

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._listener.setblocking(False)  # noqa: FBT003 - the name says it
            self._listener.bind(self._port.getsockname())
            self._listener.listen()
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        # Not asyncio's server: what that has half accepted when it is closed stays open for ever.
        client, _ = listener.accept()
        self.accepted += 1
        ends: list[asyncio.StreamWriter] = []
        task = self._loop.create_task(self._carry(client, ends))
        self._connections[task] = ends
        task.add_done_callback(lambda task: self._ended(task, client))

    async def _carry(self, client: socket.socket, ends: list[asyncio.StreamWriter]) -> None:
        """Carry one connection; both its ends are noted in ``ends``."""
        try:
            reader, writer = await asyncio.open_connection(sock=client)
            ends.append(writer)
            target_reader, target = await self._connect()
            ends.append(target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.up.carry(reader, target))
                group.create_task(self.down.carry(target_reader, writer))
        except* OSError:
            pass  # one end is gone: so is the other

    def _ended(self, task: asyncio.Task[None], client: socket.socket) -> None:
        ends = self._connections.pop(task, None)
        if ends == []:
            client.close()  # it was cancelled before anything
        for end in ends or ():
            end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        transport, _, rest = self._target.partition("://")
        if transport == "ipc":
            return await asyncio.open_unix_connection(rest)
        host, _, port = rest.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _cut(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _vanish(self) -> None:
        # Nobody carries for them any more, but their sockets stay open.
        for task, ends in list(self._connections.items()):
            if ends:
                self._vanished.append(self._connections.pop(task))
            task.cancel()

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._cut()

    async def _close(self) -> None:
        await self._refuse()
        for ends in self._vanished:
            for end in ends:
                end.transport.abort()
        self._port.close()

    def _call(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def _soon(self, work: Callable[[], None]) -> None:
        async def run() -> None:
            work()

        self._call(run())
