"""What the scheduler's half tells the ranks, in the metadata of a step.

All ranks of an engine get the same ones, in the same order. ``request`` is vLLM's id of the request,
``coordinator`` an address.
"""

from __future__ import annotations

from typing import NamedTuple


class Open(NamedTuple):
    """Prefill has queued a request that is to be handed over."""

    request: str
    room: int
    coordinator: str


class Send(NamedTuple):
    """Prefill has computed all of the request: hand over its pages."""

    request: str
    room: int
    coordinator: str
    pages: list[int]


class Offer(NamedTuple):
    """Decode has pages for the request; it has the first ``prefix_pages`` of the prompt already."""

    request: str
    room: int
    coordinator: str
    pages: list[int]
    prefix_pages: int


class Extend(NamedTuple):
    """The request still waits in decode's queue."""

    request: str
    room: int
    coordinator: str


class Cancel(NamedTuple):
    """The request has ended here before it was handed over."""

    request: str
    room: int
    coordinator: str
    why: str


Order = Open | Send | Offer | Extend | Cancel
