"""Fixtures of the worker's tests."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.worker.support import PAGES, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import Backend
    from coordinator.worker.settings import Budget


class MakeSender(Protocol):
    """Makes a ``Sender``, and cleans it up at the end of the test."""

    def __call__(
        self,
        options: dict[str, object] | None = None,
        *,
        backend: Backend | None = None,
        budget: Budget | None = None,
        pages: int = PAGES,
    ) -> Sender: ...


class MakeReceiver(Protocol):
    """Makes a ``Receiver``, and cleans it up at the end of the test."""

    def __call__(self, peer: str = "decode/0", pages: int = PAGES) -> Receiver: ...


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exits:
        yield exits


@pytest.fixture
def make_sender(stack: ExitStack) -> MakeSender:
    def make(
        options: dict[str, object] | None = None,
        *,
        backend: Backend | None = None,
        budget: Budget | None = None,
        pages: int = PAGES,
    ) -> Sender:
        sender = Sender(options, backend=backend, budget=budget, pages=pages)
        stack.callback(sender.close)
        return sender

    return make


@pytest.fixture
def make_receiver(stack: ExitStack) -> MakeReceiver:
    def make(peer: str = "decode/0", pages: int = PAGES) -> Receiver:
        receiver = Receiver(peer, pages)
        stack.callback(receiver.close)
        return receiver

    return make


@pytest.fixture
def receiver(make_receiver: MakeReceiver) -> Receiver:
    return make_receiver()
