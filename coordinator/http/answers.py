"""What is answered, as JSON. Ages and durations are seconds; a room is text.

A room is an unsigned 64-bit number, which many readers of JSON would round, JavaScript among them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all answers."""


class Problem(Answer, frozen=True, kw_only=True):
    """Why something was not done.

    Attributes:
        error: a sentence for people.

    """

    error: str


class Health(Answer, frozen=True, kw_only=True):
    """Whether something is as it should be, and what is not."""

    ok: bool
    reasons: list[str]


class QuarantineSummary(Answer, frozen=True, kw_only=True):
    """What failed handoffs hold because it is not quiet."""

    handoffs: int
    held_bytes: int
    budget_bytes: int
    trouble: str


class Status(Answer, frozen=True, kw_only=True):
    """The coordinator at a glance."""

    name: str
    version: str
    epoch: str
    backend: str
    uptime_s: float
    ready: bool
    reasons: list[str]
    draining: bool
    in_flight: dict[str, int]
    oldest_s: float | None
    oldest_after_prefill_s: float | None
    unreleased: int
    opened: int
    succeeded: int
    failed: dict[str, int]
    moved_bytes: int
    late_events: int
    quarantine: QuarantineSummary
    workers: dict[str, int]
    links: dict[str, int]
    groups: list[GroupSummary]
    log_followers: int


class GroupSummary(Answer, frozen=True, kw_only=True):
    """A group in one line; ``lag`` is how many events its slowest live rank has not acknowledged."""

    name: str
    role: str
    world_size: int
    ready: bool
    missing: list[str]
    in_flight: int
    lag: int


class Failed(Answer, frozen=True, kw_only=True):
    """Why a handoff failed: see the table of reasons in the README."""

    reason: str
    origin: str
    message: str
    fault: str
    retryable: bool


class Handoff(Answer, frozen=True, kw_only=True):
    """A handoff.

    Attributes:
        prefill, decode: the groups, as far as known.
        age_s: since its first sign; until its verdict, when it has one.
        after_prefill_s: the same since prefill was complete; null before.
        remaining_s: until its deadline; null when no clock runs.
        moving_bytes: of moves that are under way or not quiet.
        missing: what it waits for; empty when it has a verdict.
        held: the sides whose pages are not released; of one in flight, both.

    """

    room: str
    attempt: int
    state: str
    prefill: str | None
    decode: str | None
    age_s: float
    after_prefill_s: float | None
    remaining_s: float | None
    moved_bytes: int
    moving_bytes: int
    missing: str
    failure: Failed | None
    held: list[str]


class Handoffs(Answer, frozen=True, kw_only=True):
    """A page of handoffs, the oldest first.

    Attributes:
        next: give this as ``after`` to see those that follow; null when there are none.

    """

    handoffs: list[Handoff]
    next: str | None


class Step(Answer, frozen=True, kw_only=True):
    """A step of a handoff's story, ``at_s`` after it was opened."""

    at_s: float
    state: str
    cause: str


class Move(Answer, frozen=True, kw_only=True):
    """A move that is under way or not quiet."""

    link: str
    link_state: str
    move: int
    size_bytes: int
    ended: bool


class RankWord(Answer, frozen=True, kw_only=True):
    """What a rank has said of a room so far.

    Attributes:
        said: ``nothing``, ``chunks``, ``complete`` (prefill) or ``offered`` (decode).
        pages: how many pages it has named, a prefix included.
        silent_s: since the rank's last sign of life; null when there is none.

    """

    rank: str
    said: str
    pages: int
    alive: bool
    silent_s: float | None


class Story(Answer, frozen=True, kw_only=True):
    """All that is known of a room's last handoff.

    Attributes:
        ended_s: how long ago it had its verdict; null without one.
        ranks: empty after the verdict: then nothing is waited for.

    """

    handoff: Handoff
    ended_s: float | None
    story: list[Step]
    ranks: list[RankWord]
    moves: list[Move]


class Ended(Answer, frozen=True, kw_only=True):
    """What is still known of a room that ended a while ago; ``failure`` is null for success."""

    room: str
    attempt: int
    failure: Failed | None


class Rank(Answer, frozen=True, kw_only=True):
    """A rank.

    Attributes:
        lag: events that it has not acknowledged.
        unapplied: events that its engine has not drained.

    """

    name: str
    alive: bool
    listening: bool
    pid: int
    pool_bytes: int
    silent_s: float
    lag: int
    unapplied: int


class Group(Answer, frozen=True, kw_only=True):
    """A group; ``head`` is the number of its newest event, ``stable`` is what every live rank has."""

    name: str
    role: str
    world_size: int
    ready: bool
    missing: list[str]
    incarnation: int
    in_flight: int
    head: int
    stable: int
    kept_events: int
    layout: dict[str, Any]
    ranks: list[Rank]


class Peer(Answer, frozen=True, kw_only=True):
    """The link of a worker to a decode rank; ``trouble`` is why it is not up, when that is known."""

    worker: str
    peer: str
    state: str
    moves: int
    moving_bytes: int
    failures: int
    trouble: str


class Worker(Answer, frozen=True, kw_only=True):
    """A worker: the process or thread that moves the pages of one prefill rank."""

    rank: str
    state: str
    lives: int
    trouble: str
    hopeless: bool
    links: int
    moves: int


class Groups(Answer, frozen=True, kw_only=True):
    """All groups."""

    groups: list[Group]


class Peers(Answer, frozen=True, kw_only=True):
    """All links."""

    peers: list[Peer]


class Workers(Answer, frozen=True, kw_only=True):
    """All workers."""

    workers: list[Worker]


class Quarantine(Answer, frozen=True, kw_only=True):
    """What failed handoffs hold, and the first of them, those that ended longest ago first."""

    summary: QuarantineSummary
    handoffs: list[Handoff]


class Admission(Answer, frozen=True, kw_only=True):
    """Whether new handoffs are admitted, and how many are in flight."""

    draining: bool
    in_flight: int


class Reloaded(Answer, frozen=True, kw_only=True):
    """The keys whose values have changed; none when the file says what was set already."""

    changed: list[str]
