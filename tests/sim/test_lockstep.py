"""The broadcast of steps inside an engine: every follower gets every step, in order, in bounded time."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import zmq

from coordinator.messages import Outcome, Released
from coordinator.sim.errors import LockstepError, SimulationError
from coordinator.sim.lockstep import MAX_AHEAD, RollingDigest, StepReceiver, StepSender, step_address
from coordinator.sim.wire import Request, Step, encode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def directory() -> Iterator[str]:
    # pytest's own directories can be longer than the path of a socket may be.
    with TemporaryDirectory(prefix="kvc-") as path:
        yield path


def test_every_follower_gets_every_step_in_order(directory: str) -> None:
    addresses = [step_address(directory, "prefill-0", rank) for rank in (1, 2)]
    steps = [
        Step(number, b"head", [Request(number, 3, chunk_pages=1)], [(number, "why")])
        for number in range(1, 51)
    ]
    # The followers come later, as processes do.
    with (
        StepSender(addresses, 10) as sender,
        StepReceiver(addresses[0], 10) as first,
        StepReceiver(addresses[1], 10) as second,
    ):
        for step in steps:
            sender.send(step)
        assert [first.receive() for _ in steps] == steps
        assert [second.receive() for _ in steps] == steps


def test_the_last_step_arrives_although_the_sender_closes_at_once(directory: str) -> None:
    address = step_address(directory, "prefill-0", 1)
    with StepReceiver(address, 10) as receiver:
        with StepSender([address], 10) as sender:
            sender.send(Step(1, b"", last=True))
        assert receiver.receive().last


def test_the_wait_for_a_step_is_bounded(directory: str) -> None:
    with (
        StepReceiver(step_address(directory, "prefill-0", 1), 0.05) as receiver,
        pytest.raises(LockstepError, match="no step from rank 0"),
    ):
        receiver.receive()


def test_a_follower_that_takes_no_steps_is_named(directory: str) -> None:
    address = step_address(directory, "prefill-0", 1)
    sender = StepSender([address], 0.05)
    for number in range(1, MAX_AHEAD + 1):
        sender.send(Step(number, b""))
    with pytest.raises(LockstepError, match="rank 1 has taken no step"):
        sender.send(Step(MAX_AHEAD + 1, b""))
    sender.close()


@pytest.mark.parametrize("number", [1, 3], ids=["twice", "one left out"])
def test_a_step_out_of_order_is_refused_at_both_ends(directory: str, number: int) -> None:
    address = step_address(directory, "prefill-0", 1)
    with StepSender([], 1) as sender:
        sender.send(Step(1, b""))
        with pytest.raises(LockstepError, match="step 2 is due"):
            sender.send(Step(number, b""))
    with StepReceiver(address, 10) as receiver:
        with StepSender([address], 10) as first:
            first.send(Step(1, b""))
        assert receiver.receive().number == 1
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(address)
            socket.send(encode(Step(number, b"")))
            with pytest.raises(LockstepError, match="step 2 is due"):
                receiver.receive()


def test_garbage_is_an_error_of_ours(directory: str) -> None:
    address = step_address(directory, "prefill-0", 1)
    with StepReceiver(address, 10) as receiver, zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        socket.send(b"\xc1")
        with pytest.raises(SimulationError, match="malformed"):
            receiver.receive()


def test_the_digest_depends_on_steps_events_and_the_allocator() -> None:
    def digest(*updates: tuple[int, list[Outcome | Released], bytes]) -> bytes:
        rolling = RollingDigest()
        for step, events, allocator in updates:
            rolling.update(step, events, allocator)
        return rolling.value

    outcome = Outcome(1, 1)
    digests = [
        digest(),
        digest((1, [], b"a")),
        digest((2, [], b"a")),
        digest((1, [], b"b")),
        digest((1, [outcome], b"a")),
        digest((1, [Released(1, 1)], b"a")),
        digest((1, [outcome], b"a"), (2, [], b"a")),
        # The same event, a step later.
        digest((1, [], b"a"), (2, [outcome], b"a")),
    ]
    assert len(set(digests)) == len(digests)


def test_addresses_fit_into_a_socket_path(directory: str) -> None:
    assert len(step_address(directory, "prefill-0", 63)) < 107
