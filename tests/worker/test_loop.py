"""The worker's own loop, turn by turn: what it does with a line that takes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import zmq

from coordinator import messages
from coordinator.messages import Fenced, Reports, WorkerHello
from coordinator.worker.loop import ControlLoop
from coordinator.worker.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator.worker.host import WorkerHost

ADDRESS = "inproc://control"
HELLO = WorkerHello(messages.VERSION, bytes(32), 1, lands_after_settled=True)
PATIENCE_MS = 10_000


class Line:
    """A loop over a socket that leads nowhere at first, and whoever may listen later."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.desk = context.socket(zmq.ROUTER)
        self.desk.bind(ADDRESS)
        self.socket = context.socket(zmq.DEALER)
        self.outbox = Outbox()
        host = cast("WorkerHost", SimpleNamespace())
        self.loop = ControlLoop(self.socket, HELLO, host, self.outbox, 60.0)

    def waits_for(self) -> int:
        """For what the loop would wait on its socket."""
        return int(dict(self.loop._poller.sockets)[self.socket])

    def arrived(self) -> messages.FromPeer:
        """Receive what has arrived."""
        assert self.desk.poll(PATIENCE_MS)
        return messages.decode_from_peer(self.desk.recv_multipart()[1])


@pytest.fixture
def line() -> Iterator[Line]:
    with zmq.Context() as context:
        made = Line(context)
        yield made
        made.outbox.close()
        made.socket.close(0)
        made.desk.close(0)


def test_what_the_line_does_not_take_goes_out_once_it_does_and_in_order(line: Line) -> None:
    line.outbox.put(Fenced("d/0"))
    for _ in range(2):
        line.loop._send()
        assert line.waits_for() == zmq.POLLIN | zmq.POLLOUT
    line.socket.connect(ADDRESS)
    line.loop._send()
    assert line.arrived() == HELLO
    assert line.arrived() == Reports([Fenced("d/0")])


def test_a_line_that_takes_everything_again_is_not_waited_for(line: Line) -> None:
    """It could take more at any time: the loop would never sleep."""
    line.loop._send()
    line.socket.connect(ADDRESS)
    for _ in range(2):
        line.loop._send()
        assert line.waits_for() == zmq.POLLIN
